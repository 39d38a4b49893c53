/* codebook.h - `hcattn codebook train`: trains the codebooks of product quantization. */
#pragma once
int codebook_command(int argc, char **argv);
