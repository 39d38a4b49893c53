# The files of kernels, for nvcc and for the tests that compile them for the CPU.
set(cuda_sources
    cuda_attend.cu
    cuda_attend_decode.cu
    cuda_copy.cu
    cuda_decode_keys.cu
    cuda_dequantize.cu
    cuda_elementwise.cu
    cuda_encode_rows.cu
    cuda_halves.cu
    cuda_matvec.cu
    cuda_merge.cu
    cuda_prefill_query.cu
    cuda_prefill_rows.cu
    cuda_prefill_softmax.cu
    cuda_prepare_pair.cu
    cuda_prepare_rot.cu
    cuda_quantize_f16.cu
    cuda_quantize_pair.cu
    cuda_quantize_pq.cu
    cuda_quantize_rot.cu
    cuda_rms_norm.cu
    cuda_rope.cu
    cuda_score_exact.cu
    cuda_score_f16.cu
    cuda_sample.cu
    cuda_score_pair.cu
    cuda_score_pq.cu
    cuda_score_rot.cu
    cuda_selection.cu
    cuda_selection_finish.cu
    cuda_selection_search.cu)
# The back end's table, in C, for the same two.
set(cuda_backend_sources
    backend_cuda.c
    cuda_blas.c
    cuda_commands.c
    cuda_device.c
    cuda_host.c
    cuda_key_quantize.c
    cuda_key_select.c
    cuda_key_tables.c
    cuda_prefill.c
    cuda_product.c
    cuda_visible.c)
# What finds cuBLAS; tests have a file of their own instead.
set(cuda_blas_loader cuda_blas_load.c)
