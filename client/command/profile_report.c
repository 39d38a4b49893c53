/* profile_report.c - see profile_report.h. */
#include "client/command/profile_report.h"
#include "client/command/output.h"
#include "client/command/report.h"

#include <inttypes.h>

#define N_CLASSES (HCATTN_HEAD_LOCAL + 1)

/* From the cheapest on, as they are tried. */
static const enum hcattn_head_class order[N_CLASSES] = {HCATTN_HEAD_SPECIAL, HCATTN_HEAD_PUNCTUATION,
                                                        HCATTN_HEAD_FREQUENT, HCATTN_HEAD_LOCAL, HCATTN_HEAD_FULL};
static const char letters[N_CLASSES + 1] = "FSPQL"; /* [enum hcattn_head_class] */
static const char *const meanings[N_CLASSES] = {"all tokens: keeps quantized keys on the device", "special tokens",
                                                "and punctuation", "and the tokens with the most attention",
                                                "and the last ones"};

static void count(const struct hcattn_description *description, uint32_t ret_n[N_CLASSES])
{
    size_t n_heads = (size_t)description->n_layers * description->n_kv_heads;
    for (size_t i = 0; i < n_heads; i++)
        ret_n[description->profile.classes[i]]++;
}

void profile_report_table(const struct hcattn_description *description)
{
    const struct hcattn_profile *profile = &description->profile;
    uint32_t n_heads = description->n_kv_heads, counts[N_CLASSES] = {0};
    output_format("%" PRIu64 " tokens, recovery %.4g, policy %s\n\nlayer", profile->n_tokens, (double)profile->recovery,
                  report_word(description->stats.policy));
    for (uint32_t head = 0; head < n_heads; head++)
        output_format("  head %-2" PRIu32, head);
    output_text("\n");
    for (uint32_t layer = 0; layer < description->n_layers; layer++) {
        output_format("%5" PRIu32, layer);
        for (uint32_t head = 0; head < n_heads; head++) {
            size_t i = (size_t)layer * n_heads + head;
            output_format("  %c %5.3f", letters[profile->classes[i]], (double)profile->kept_mass[i]);
        }
        output_text("\n");
    }
    count(description, counts);
    uint32_t all = description->n_layers * n_heads;
    output_text("\nheads by the tokens that are enough; behind the letter the attention mass that they keep\n");
    for (size_t i = 0; i < N_CLASSES; i++)
        output_format("%c %-12s %5" PRIu32 " %5.1f %%  %s\n", letters[order[i]], hcattn_head_class_name(order[i]),
                      counts[order[i]], all ? 100.0 * counts[order[i]] / all : 0.0, meanings[order[i]]);
}

json_t *profile_report_json(const struct hcattn_description *description)
{
    const struct hcattn_profile *profile = &description->profile;
    uint32_t counts[N_CLASSES] = {0};
    json_t *classes = json_array(), *kept = json_array(), *numbers = json_object();
    for (uint32_t layer = 0; layer < description->n_layers; layer++) {
        json_t *layer_classes = json_array(), *layer_kept = json_array();
        for (uint32_t head = 0; head < description->n_kv_heads; head++) {
            size_t i = (size_t)layer * description->n_kv_heads + head;
            enum hcattn_head_class head_class = (enum hcattn_head_class)profile->classes[i];
            json_array_append_new(layer_classes, json_string(hcattn_head_class_name(head_class)));
            json_t *mass = json_real((double)profile->kept_mass[i]);
            json_array_append_new(layer_kept, mass ? mass : json_null());
        }
        json_array_append_new(classes, layer_classes);
        json_array_append_new(kept, layer_kept);
    }
    count(description, counts);
    for (size_t i = 0; i < N_CLASSES; i++)
        json_object_set_new(numbers, hcattn_head_class_name(order[i]), json_integer(counts[order[i]]));
    return json_pack("{s:I,s:f,s:o,s:I,s:I,s:o,s:o,s:o}",              //
                     "tokens", (json_int_t)profile->n_tokens,          //
                     "recovery", (double)profile->recovery,            //
                     "policy", report_text(description->stats.policy), //
                     "layers", (json_int_t)description->n_layers,      //
                     "kv_heads", (json_int_t)description->n_kv_heads,  //
                     "classes", classes, "kept_mass", kept, "counts", numbers);
}
