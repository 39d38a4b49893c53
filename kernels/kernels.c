/* kernels.c - which table this CPU can run, the floating-point mode of a thread, CRC-32C. */
#include "kernels/kernels.h"

#include <errno.h>
#include <string.h>

#include "kernels/row_format.h"
#include "kernels/tables.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* __builtin_cpu_supports also asks the operating system (xgetbv) whether it saves the wide registers. */
static int have_avx2(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("bmi2");
#else
    return 0;
#endif
}

static int have_avx512(void)
{
#if defined(__x86_64__)
    return have_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return 0;
#endif
}

const struct kernels *kernels_get(enum kernels_isa isa)
{
#if defined(__x86_64__)
    if ((isa == KERNELS_ISA_AVX512 || isa == KERNELS_ISA_AUTO) && have_avx512())
        return &avx512_table;
    if ((isa == KERNELS_ISA_AVX2 || isa == KERNELS_ISA_AUTO) && have_avx2())
        return &avx2_table;
#endif
    return isa == KERNELS_ISA_PLAIN || isa == KERNELS_ISA_AUTO ? &plain_table : NULL;
}

size_t kernels_row_bytes(uint32_t head_dim, enum kernels_rows codec)
{
    return row_bytes(head_dim, codec);
}

int kernels_isa_parse(const char *name, enum kernels_isa *ret_isa)
{
    static const char *const names[KERNELS_N_ISA] = {"auto", "plain", "avx2", "avx512"};
    for (int i = 0; i < KERNELS_N_ISA; i++) {
        if (strcmp(name, names[i]) == 0) {
            *ret_isa = (enum kernels_isa)i;
            return 0;
        }
    }
    return -EINVAL;
}

void kernels_thread_setup(void)
{
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040u); /* flush to zero, denormals are zero */
#endif
}

static uint32_t crc32c_plain(uint32_t crc, const uint8_t *bytes, size_t n_bytes)
{
    /* One nibble a step: a table of 16 is enough for machines without the instruction. */
    static const uint32_t table[16] = {
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
        0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
    };
    for (size_t i = 0; i < n_bytes; i++) {
        crc ^= bytes[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t crc32c_sse42(uint32_t crc, const uint8_t *bytes, size_t n_bytes)
{
    uint64_t wide = crc;
    for (; n_bytes >= 8; bytes += 8, n_bytes -= 8) {
        uint64_t word;
        memcpy(&word, bytes, sizeof word);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = (uint32_t)wide;
    for (; n_bytes; bytes++, n_bytes--)
        crc = _mm_crc32_u8(crc, *bytes);
    return crc;
}
#endif

uint32_t kernels_crc32c(uint32_t crc, const void *bytes, size_t n_bytes)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2"))
        return ~crc32c_sse42(~crc, bytes, n_bytes);
#endif
    return ~crc32c_plain(~crc, bytes, n_bytes);
}
