/* halves.c - the tables under test; see halves.h. Compiled with the flags of AVX2. */
#define VECTOR_WIDTH 16
#include "tests/unit/kernels/halves.h"

#include "kernels/vector_table.h"

VECTOR_TABLE(halves_table, KERNELS_ISA_AVX512, "halves");

void halves_exp(const float *x, float *y)
{
    vf_store(y, vf_exp(vf_load(x)));
}

const struct kernels *const *halves_tables(void)
{
    static const struct kernels *tables[KERNELS_N_ISA + 1];
    int n = 0;
    tables[n++] = kernels_get(KERNELS_ISA_PLAIN);
    if (kernels_get(KERNELS_ISA_AVX2)) {
        tables[n++] = kernels_get(KERNELS_ISA_AVX2);
        tables[n++] = &halves_table;
    }
    if (kernels_get(KERNELS_ISA_AVX512))
        tables[n++] = kernels_get(KERNELS_ISA_AVX512);
    tables[n] = NULL;
    return tables;
}
