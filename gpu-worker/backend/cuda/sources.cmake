# The files of kernels, for nvcc and for the tests that compile them for the CPU.
set(cuda_sources
    cuda_attend.cu
    cuda_copy.cu
    cuda_dequantize.cu
    cuda_elementwise.cu
    cuda_encode_rows.cu
    cuda_matvec.cu
    cuda_merge.cu
    cuda_prepare_pair.cu
    cuda_prepare_rot.cu
    cuda_quantize_pair.cu
    cuda_quantize_pq.cu
    cuda_quantize_rot.cu
    cuda_rms_norm.cu
    cuda_rope.cu
    cuda_score_pair.cu
    cuda_score_pq.cu
    cuda_score_rot.cu
    cuda_selection.cu
    cuda_selection_finish.cu
    cuda_selection_search.cu)
# The back end's table, in C, for the same two.
set(cuda_backend_sources
    backend_cuda.c
    cuda_commands.c
    cuda_host.c)
