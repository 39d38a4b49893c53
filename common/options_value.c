/* options_value.c - text to values and their accessors. */
#include "common/options_internal.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Text of a unit and what one of it is worth. */
struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit byte_units[] = {
    {"", 1},
    {"B", 1},
    {"K", UINT64_C(1) << 10},
    {"KiB", UINT64_C(1) << 10},
    {"M", UINT64_C(1) << 20},
    {"MiB", UINT64_C(1) << 20},
    {"G", UINT64_C(1) << 30},
    {"GiB", UINT64_C(1) << 30},
    {"T", UINT64_C(1) << 40},
    {"TiB", UINT64_C(1) << 40},
    {"kB", 1000},
    {"MB", 1000000},
    {"GB", 1000000000},
    {"TB", UINT64_C(1000000000000)},
    {NULL, 0},
};

static const struct unit time_units[] = {
    {"", 1}, {"ms", 1}, {"s", 1000}, {"m", 60000}, {"h", 3600000}, {NULL, 0},
};

/* Digits only: strtoull would take "-1", " 1" and "0x1". */
static int read_whole(const char *text, const char **ret_end, uint64_t *ret_number)
{
    uint64_t number = 0;
    const char *c = text;
    for (; *c >= '0' && *c <= '9'; c++) {
        uint64_t digit = (uint64_t)(*c - '0');
        if (number > (UINT64_MAX - digit) / 10)
            return -ERANGE;
        number = number * 10 + digit;
    }
    if (c == text)
        return -EINVAL;
    *ret_end = c;
    *ret_number = number;
    return 0;
}

/* A whole number, or one with up to 9 decimals, and a unit. What does not come out whole is rounded down. */
static int read_with_unit(const char *text, const struct unit *units, uint64_t *ret_number)
{
    const char *end;
    uint64_t whole, fraction = 0, scale = 1;
    int error = read_whole(text, &end, &whole);
    if (error)
        return error;
    if (*end == '.') {
        for (end++; *end >= '0' && *end <= '9'; end++) {
            if (scale == 1000000000)
                return -EINVAL;
            fraction = fraction * 10 + (uint64_t)(*end - '0');
            scale *= 10;
        }
        if (scale == 1)
            return -EINVAL;
    }
    while (*end == ' ')
        end++;
    for (const struct unit *unit = units; unit->name; unit++) {
        if (strcmp(unit->name, end) != 0)
            continue;
        if (unit->factor == 1 && fraction != 0)
            return -EINVAL; /* no parts of a byte or millisecond */
        if (whole > UINT64_MAX / unit->factor)
            return -ERANGE;
        /* factor < 2^41 and fraction < 2^30 would overflow a product: long double has the 64 bits */
        uint64_t part = (uint64_t)((long double)fraction / (long double)scale * (long double)unit->factor);
        if (part > UINT64_MAX - whole * unit->factor)
            return -ERANGE;
        *ret_number = whole * unit->factor + part;
        return 0;
    }
    return -EINVAL;
}

static int read_memory(const char *text, struct option_value *value)
{
    const char *end;
    uint64_t percent;
    if (read_whole(text, &end, &percent) < 0 || strcmp(end, "%") != 0)
        return read_with_unit(text, byte_units, &value->number);
    if (percent < 1 || percent > 100)
        return -EINVAL;
    value->percent = (uint32_t)percent;
    return 0;
}

static int read_flag(const char *text, uint64_t *ret_number)
{
    static const char *const yes[] = {"yes", "true", "on", "1"}, *const no[] = {"no", "false", "off", "0"};
    for (size_t i = 0; i < 4; i++) {
        if (strcmp(text, yes[i]) == 0 || strcmp(text, no[i]) == 0) {
            *ret_number = strcmp(text, yes[i]) == 0;
            return 0;
        }
    }
    return -EINVAL;
}

static int read_choice(const struct option_spec *spec, const char *text, uint64_t *ret_number, char *why,
                       size_t why_size)
{
    for (size_t i = 0; spec->choices[i]; i++) {
        if (strcmp(spec->choices[i], text) == 0) {
            *ret_number = i;
            return 0;
        }
    }
    size_t n = (size_t)snprintf(why, why_size, "it must be one of");
    for (size_t i = 0; spec->choices[i] && n < why_size; i++)
        n += (size_t)snprintf(why + n, why_size - n, "%s %s", i ? "," : "", spec->choices[i]);
    return -EINVAL;
}

static int read_real(const char *text, double *ret_real)
{
    char *end;
    if (*text == '\0' || strspn(text, "0123456789+-.eE") != strlen(text))
        return -EINVAL;
    double real = strtod(text, &end);
    if (*end != '\0' || !isfinite(real))
        return -EINVAL;
    *ret_real = real;
    return 0;
}

static int check_range(const struct option_spec *spec, double number, char *why, size_t why_size)
{
    if (spec->minimum == 0 && spec->maximum == 0)
        return 0;
    if (number >= spec->minimum && number <= spec->maximum)
        return 0;
    snprintf(why, why_size, "it must lie between %.15g and %.15g%s", spec->minimum, spec->maximum,
             spec->kind == OPTION_BYTES      ? " bytes"
             : spec->kind == OPTION_DURATION ? " ms"
                                             : "");
    return -EINVAL;
}

int options_value_read(const struct option_spec *spec, const char *text, struct option_value *ret_value, char *why,
                       size_t why_size)
{
    static const char *const expected[] = {
        [OPTION_STRING] = "a text is expected",
        [OPTION_U32] = "a whole number is expected",
        [OPTION_U64] = "a whole number is expected",
        [OPTION_BYTES] = "a size such as 4096, 512MiB or 4GiB is expected",
        [OPTION_FLOAT] = "a number is expected",
        [OPTION_FLAG] = "yes or no is expected",
        [OPTION_DURATION] = "a duration such as 250ms, 2s or 1m is expected",
        [OPTION_CHOICE] = "",
        [OPTION_MEMORY] = "a size such as 512MiB or 4GiB, or 1% to 100% is expected",
    };
    struct option_value value = {0};
    const char *end = "";
    int error = 0;
    switch (spec->kind) {
    case OPTION_STRING:
        break;
    case OPTION_U32:
    case OPTION_U64:
        error = read_whole(text, &end, &value.number);
        if (!error && *end != '\0')
            error = -EINVAL;
        if (!error && spec->kind == OPTION_U32 && value.number > UINT32_MAX)
            error = -ERANGE;
        break;
    case OPTION_BYTES:
        error = read_with_unit(text, byte_units, &value.number);
        break;
    case OPTION_MEMORY:
        error = read_memory(text, &value);
        break;
    case OPTION_DURATION:
        error = read_with_unit(text, time_units, &value.number);
        break;
    case OPTION_FLOAT:
        error = read_real(text, &value.real);
        break;
    case OPTION_FLAG:
        error = read_flag(text, &value.number);
        break;
    case OPTION_CHOICE:
        error = read_choice(spec, text, &value.number, why, why_size);
        if (error)
            return error;
        break;
    }
    if (error) {
        snprintf(why, why_size, "%s", error == -ERANGE ? "it is too large" : expected[spec->kind]);
        return -EINVAL;
    }
    if (spec->kind != OPTION_STRING && spec->kind != OPTION_FLAG && spec->kind != OPTION_CHOICE && !value.percent)
        error = check_range(spec, spec->kind == OPTION_FLOAT ? value.real : (double)value.number, why, why_size);
    if (!error)
        *ret_value = value;
    return error;
}

static const struct option_value *value_of(const struct options *options, const char *name, int kind)
{
    for (size_t i = 0; i < options->table->n_specs; i++) {
        const struct option_spec *spec = &options->table->specs[i];
        if (strcmp(spec->name, name) != 0)
            continue;
        assert(kind < 0 || (int)spec->kind == kind);
        return &options->values[i];
    }
    assert(!"no such option in the table");
    abort(); /* also with asserts off: there is no value to give */
}

static int kind_of(const struct options *options, const char *name)
{
    return (int)options->table->specs[value_of(options, name, -1) - options->values].kind;
}

const char *options_string(const struct options *options, const char *name)
{
    return value_of(options, name, OPTION_STRING)->text;
}

size_t options_n_strings(const struct options *options, const char *name)
{
    return value_of(options, name, OPTION_STRING)->n_all;
}

const char *options_string_at(const struct options *options, const char *name, size_t index)
{
    const struct option_value *value = value_of(options, name, OPTION_STRING);
    assert(index < value->n_all);
    return value->all[index];
}

uint32_t options_u32(const struct options *options, const char *name)
{
    return (uint32_t)value_of(options, name, OPTION_U32)->number;
}

uint64_t options_u64(const struct options *options, const char *name)
{
    return value_of(options, name, OPTION_U64)->number;
}

uint64_t options_bytes(const struct options *options, const char *name)
{
    return value_of(options, name, kind_of(options, name) == OPTION_MEMORY ? OPTION_MEMORY : OPTION_BYTES)->number;
}

uint32_t options_percent(const struct options *options, const char *name)
{
    return value_of(options, name, OPTION_MEMORY)->percent;
}

double options_float(const struct options *options, const char *name)
{
    return value_of(options, name, OPTION_FLOAT)->real;
}

bool options_flag(const struct options *options, const char *name)
{
    return value_of(options, name, OPTION_FLAG)->number != 0;
}

uint64_t options_duration_ms(const struct options *options, const char *name)
{
    return value_of(options, name, OPTION_DURATION)->number;
}

uint32_t options_choice(const struct options *options, const char *name)
{
    return (uint32_t)value_of(options, name, OPTION_CHOICE)->number;
}

enum option_source options_source(const struct options *options, const char *name)
{
    return value_of(options, name, -1)->source;
}

bool options_given(const struct options *options, const char *name)
{
    return options_source(options, name) != OPTION_FROM_DEFAULT;
}

const char *options_text(const struct options *options, const char *name)
{
    return value_of(options, name, -1)->text;
}

const char *options_source_name(enum option_source source)
{
    static const char *const names[] = {
        [OPTION_FROM_DEFAULT] = "default",
        [OPTION_FROM_CONFIG] = "configuration file",
        [OPTION_FROM_ENVIRONMENT] = "environment",
        [OPTION_FROM_COMMAND_LINE] = "command line",
    };
    return names[source];
}

bool options_help_wanted(const struct options *options)
{
    return options->help_wanted;
}

bool options_version_wanted(const struct options *options)
{
    return options->version_wanted;
}

size_t options_n_positional(const struct options *options)
{
    return options->n_positional;
}

const char *options_positional(const struct options *options, size_t index)
{
    assert(index < options->n_positional);
    return options->positional[index];
}

const char *options_config_file(const struct options *options)
{
    return options->config_file;
}
