/* passes_plain.c - passes.h in plain C: any machine. */
#include "gpu-worker/policy/lanes_plain.h"
#include "gpu-worker/policy/passes_loops.h"

PASSES_TABLE(passes_plain);
