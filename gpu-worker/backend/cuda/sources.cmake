# The files of kernels, for nvcc and for the tests that compile them for the CPU.
set(cuda_sources
    cuda_attend.cu
    cuda_dequantize.cu
    cuda_elementwise.cu
    cuda_encode_rows.cu
    cuda_matvec.cu
    cuda_rms_norm.cu
    cuda_rope.cu)
