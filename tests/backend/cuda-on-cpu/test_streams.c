/* test_streams.c - captures and graphs of the emulated device, and the errors that tests can make it give. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <cublas_v2.h>

#include "tests/backend/cuda-on-cpu/device.h"
#include "tests/backend/cuda-on-cpu/emulation_control.h"
#include "tests/backend/cuda-on-cpu/kernels_of_emulation.h"

enum { N = 100 };
static const size_t n_bytes = N * sizeof(float);

static cudaStream_t stream_new(unsigned int flags)
{
    cudaStream_t stream = NULL;
    assert_int_equal(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
    return stream;
}

/* A graph with every kind of work is written down, not done, and plays with what its memory holds then. */
static void a_graph_plays_what_was_captured(void **state)
{
    (void)state;
    device_run(0);
    const size_t n_before = emulation_n_objects();
    cudaStream_t stream = stream_new(cudaStreamNonBlocking);
    cublasHandle_t blas = NULL;
    assert_int_equal(cublasCreate(&blas), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(cublasSetStream(blas, stream), CUBLAS_STATUS_SUCCESS);
    float *host = NULL;
    assert_int_equal(cudaMallocHost((void **)&host, 2 * n_bytes), cudaSuccess);
    for (int i = 0; i < 2 * N; i++)
        host[i] = (float)i;
    float *x = device_new(host, n_bytes), *y = device_new(host, n_bytes);

    enum cudaStreamCaptureStatus status;
    float factor = 3, alpha = 2, beta = 1;
    cudaGraph_t graph = NULL;
    assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    assert_int_equal(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    assert_int_equal(status, cudaStreamCaptureStatusActive);
    assert_int_equal(cudaMemcpyAsync(x, host, n_bytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
    assert_int_equal(kernels_scale(stream, x, N, factor), cudaSuccess);
    assert_int_equal(cudaMemsetAsync(x, 0, sizeof *x, stream), cudaSuccess);
    assert_int_equal(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &alpha, x + 7, CUDA_R_32F, 1, x + 8,
                                  CUDA_R_32F, 1, &beta, y, CUDA_R_32F, 1, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_SUCCESS);
    assert_int_equal(cudaMemcpyAsync(host + N, x, n_bytes, cudaMemcpyDeviceToHost, stream), cudaSuccess);
    factor = alpha = beta = 0; /* numbers are kept, not their places */
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    assert_int_equal(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    assert_int_equal(status, cudaStreamCaptureStatusNone);
    for (int i = 0; i < 2 * N; i++)
        assert_true(host[i] == (float)i); /* nothing was done */

    size_t n_nodes = 0;
    cudaGraphExec_t played = NULL;
    assert_int_equal(cudaGraphGetNodes(graph, NULL, &n_nodes), cudaSuccess);
    assert_int_equal(n_nodes, 5);
    assert_int_equal(cudaGraphInstantiate(&played, graph, 0), cudaSuccess);
    assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
    float sum = 0;
    for (int times = 0; times < 3; times++) {
        for (int i = 0; i < N; i++)
            host[i] = (float)(i + times);
        assert_int_equal(cudaGraphLaunch(played, stream), cudaSuccess);
        assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
        for (int i = 0; i < N; i++)
            assert_true(host[N + i] == (i ? (float)(3 * (i + times) + 1) : 0));
        sum += 2 * host[N + 7] * host[N + 8];
        float product;
        device_read(&product, y, sizeof product);
        assert_true(product == sum);
    }

    /* a graph in a capture is a part of the new graph */
    cudaGraphExec_t outer = NULL;
    assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
    assert_int_equal(cudaGraphLaunch(played, stream), cudaSuccess);
    assert_int_equal(kernels_scale(stream, x, N, 1), cudaSuccess);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    assert_int_equal(cudaGraphInstantiate(&outer, graph, 0), cudaSuccess);
    assert_int_equal(cudaGraphExecDestroy(played), cudaSuccess);
    assert_int_equal(cudaGraphLaunch(outer, stream), cudaSuccess);
    device_read(host, x, n_bytes);
    assert_true(host[0] == 1 && host[1] == 11);
    assert_int_equal(cudaGraphExecDestroy(outer), cudaSuccess);
    assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
    assert_int_equal(cublasDestroy(blas), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(cudaStreamDestroy(stream), cudaSuccess);
    device_free(x);
    device_free(y);
    assert_int_equal(cudaFreeHost(host), cudaSuccess);
    assert_int_equal(emulation_n_objects(), n_before);
}

/* What a capture does not take, one a row: the error, whether it spoils the capture. */
enum forbidden {
    ALLOCATE,
    FREE,
    COPY,
    SYNCHRONIZE,
    SYNCHRONIZE_DEVICE,
    QUERY,
    QUERY_CAPTURED_EVENT,
    PAGEABLE,
    LEGACY,
    BAD_LAUNCH,
    WAIT_FOR_OUTSIDE,
    BEGIN_TWICE,
    ATTRIBUTE,
    CREATE_EVENT,
    WAIT_FOR_OWN,
    N_FORBIDDEN,
};

static cudaError_t forbidden(enum forbidden which, cudaStream_t stream, float *x, cudaEvent_t outside)
{
    static float pageable[N];
    void *memory = NULL;
    cudaEvent_t event = NULL;
    cudaError_t error = cudaSuccess;
    switch (which) {
    case ALLOCATE:
        error = cudaMalloc(&memory, 16);
        (void)cudaFree(memory);
        return error;
    case FREE:
        return cudaFree(x);
    case COPY:
        return cudaMemcpy(x, pageable, n_bytes, cudaMemcpyHostToDevice);
    case SYNCHRONIZE:
        return cudaStreamSynchronize(stream);
    case SYNCHRONIZE_DEVICE:
        return cudaDeviceSynchronize();
    case QUERY:
        return cudaStreamQuery(stream);
    case PAGEABLE:
        return cudaMemcpyAsync(x, pageable, n_bytes, cudaMemcpyHostToDevice, stream);
    case LEGACY:
        return kernels_scale(NULL, x, N, 1);
    case BAD_LAUNCH:
        return kernels_scale(stream, x, 0, 1); /* no blocks */
    case WAIT_FOR_OUTSIDE:
        return cudaStreamWaitEvent(stream, outside, 0);
    case BEGIN_TWICE:
        return cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
    case QUERY_CAPTURED_EVENT:
    case CREATE_EVENT:
    case WAIT_FOR_OWN:
        error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
        if (!error && which != CREATE_EVENT)
            error = cudaEventRecord(event, stream);
        if (!error && which == WAIT_FOR_OWN)
            error = cudaStreamWaitEvent(stream, event, 0);
        if (!error && which == QUERY_CAPTURED_EVENT)
            error = cudaEventQuery(event);
        (void)cudaEventDestroy(event);
        return error;
    case ATTRIBUTE:
        return kernels_launch_error(32, 1024, 1);
    default:
        return cudaErrorInvalidValue;
    }
}

static void what_a_capture_does_not_take(void **state)
{
    (void)state;
    static const struct {
        cudaError_t strict, relaxed; /* not relaxed, on a blocking stream; relaxed, on one that is not */
        bool spoils, spoils_relaxed;
    } rows[N_FORBIDDEN] = {
        [ALLOCATE] = {cudaErrorStreamCaptureUnsupported, cudaSuccess, true, false},
        [FREE] = {cudaErrorStreamCaptureUnsupported, cudaSuccess, true, false},
        [COPY] = {cudaErrorStreamCaptureUnsupported, cudaSuccess, true, false},
        [SYNCHRONIZE] = {cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureUnsupported, true, true},
        [SYNCHRONIZE_DEVICE] = {cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureUnsupported, true, true},
        [QUERY] = {cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureUnsupported, true, true},
        [QUERY_CAPTURED_EVENT] = {cudaErrorStreamCaptureUnsupported, cudaErrorCapturedEvent, true, true},
        [PAGEABLE] = {cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureUnsupported, true, true},
        [LEGACY] = {cudaErrorStreamCaptureImplicit, cudaSuccess, true, false},
        [BAD_LAUNCH] = {cudaErrorInvalidConfiguration, cudaErrorInvalidConfiguration, true, true},
        [WAIT_FOR_OUTSIDE] = {cudaErrorStreamCaptureIsolation, cudaErrorStreamCaptureIsolation, true, true},
        [BEGIN_TWICE] = {cudaErrorIllegalState, cudaErrorIllegalState, false, false},
        [ATTRIBUTE] = {cudaErrorStreamCaptureImplicit, cudaSuccess, true,
                       false}, /* its launch is in the legacy stream */
        [CREATE_EVENT] = {cudaSuccess, cudaSuccess, false, false},
        [WAIT_FOR_OWN] = {cudaSuccess, cudaSuccess, false, false},
    };
    const size_t n_before = emulation_n_objects();
    for (int which = 0; which < N_FORBIDDEN; which++) {
        for (int mode = cudaStreamCaptureModeGlobal; mode <= cudaStreamCaptureModeRelaxed; mode++) {
            const bool relaxed = mode == cudaStreamCaptureModeRelaxed, freed = which == FREE && relaxed;
            cudaStream_t stream = stream_new(relaxed ? cudaStreamNonBlocking : cudaStreamDefault);
            float *x = device_new(NULL, n_bytes);
            cudaEvent_t outside = NULL;
            cudaGraph_t graph = (cudaGraph_t)&outside;
            enum cudaStreamCaptureStatus status;
            assert_int_equal(cudaEventCreateWithFlags(&outside, 0), cudaSuccess);
            assert_int_equal(cudaStreamBeginCapture(stream, (enum cudaStreamCaptureMode)mode), cudaSuccess);
            assert_int_equal(kernels_scale(stream, x, N, 1), cudaSuccess);
            const cudaError_t error = forbidden((enum forbidden)which, stream, x, outside);
            const cudaError_t expected = relaxed ? rows[which].relaxed : rows[which].strict;
            if (error != expected)
                fail_msg("row %d, mode %d: %s", which, mode, cudaGetErrorName(error));
            const bool spoils = relaxed ? rows[which].spoils_relaxed : rows[which].spoils;
            assert_int_equal(cudaStreamIsCapturing(stream, &status), cudaSuccess);
            assert_int_equal(status, spoils ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive);
            if (spoils) {
                assert_int_equal(kernels_scale(stream, x, N, 1), cudaErrorStreamCaptureInvalidated);
                assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
                assert_null(graph);
            } else {
                assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
                assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
            }
            /* the stream is as before */
            assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorIllegalState);
            (void)cudaGetLastError();
            if (!freed)
                assert_int_equal(kernels_scale(stream, x, N, 1), cudaSuccess);
            assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
            assert_int_equal(cudaStreamDestroy(stream), cudaSuccess);
            assert_int_equal(cudaEventDestroy(outside), cudaSuccess);
            if (!freed)
                device_free(x);
            assert_int_equal(emulation_n_objects(), n_before);
        }
    }
}

static void *end_elsewhere(void *stream)
{
    cudaGraph_t graph = NULL;
    return (void *)(uintptr_t)cudaStreamEndCapture(stream, &graph);
}

/* Also: another thread may go on where one stopped. */
static void a_capture_belongs_to_a_thread(void **state)
{
    (void)state;
    pthread_t thread;
    void *error = NULL;
    cudaGraph_t graph = NULL;
    cudaStream_t stream = stream_new(cudaStreamNonBlocking);
    assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    assert_int_equal(pthread_create(&thread, NULL, end_elsewhere, stream), 0);
    assert_int_equal(pthread_join(thread, &error), 0);
    assert_int_equal((uintptr_t)error, cudaErrorStreamCaptureWrongThread);
    assert_int_equal(cudaGetLastError(), cudaSuccess); /* errors are a thread's own */
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
    assert_int_equal(cudaStreamDestroy(stream), cudaSuccess);
}

static void *run_elsewhere(void *x)
{
    return (void *)(uintptr_t)(kernels_scale(NULL, x, N, 1) || cudaDeviceSynchronize());
}

static void threads_take_turns(void **state)
{
    (void)state;
    device_run(1);
    float host[N] = {0};
    float *x = device_new(host, n_bytes);
    for (int turn = 0; turn < 4; turn++) {
        pthread_t thread;
        void *error = NULL;
        assert_int_equal(kernels_scale(NULL, x, N, 1), cudaSuccess);
        assert_int_equal(pthread_create(&thread, NULL, run_elsewhere, x), 0);
        assert_int_equal(pthread_join(thread, &error), 0);
        assert_null(error);
    }
    device_read(host, x, n_bytes);
    for (int i = 0; i < N; i++)
        assert_true(host[i] == 8);
    device_free(x);
}

/* ---- errors on purpose ---- */

/* Some of everything; the first error. Frees what it has whatever happens. */
static cudaError_t some_of_everything(cudaError_t errors[], int *n_errors)
{
    float *x = NULL, *host = NULL;
    cudaStream_t stream = NULL;
    cudaEvent_t event = NULL;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t played = NULL;
    int value;
    *n_errors = 0;
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        errors[*n_errors] = (call);                                                                                    \
        if (errors[(*n_errors)++])                                                                                     \
            goto done;                                                                                                 \
    } while (0)
    TRY(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    TRY(cudaMalloc((void **)&x, n_bytes));
    TRY(cudaMallocHost((void **)&host, n_bytes));
    TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    TRY(cudaMemsetAsync(x, 0, n_bytes, stream));
    TRY(kernels_scale(stream, x, N, 1));
    TRY(cudaEventRecord(event, stream));
    TRY(cudaEventSynchronize(event));
    TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    {
        cudaError_t error = kernels_scale(stream, x, N, 1);
        errors[(*n_errors)++] = error;
        error = cudaStreamEndCapture(stream, &graph);
        if (errors[*n_errors - 1])
            goto done;
        TRY(error);
    }
    TRY(cudaGraphInstantiate(&played, graph, 0));
    TRY(cudaGraphLaunch(played, stream));
    TRY(cudaMemcpyAsync(host, x, n_bytes, cudaMemcpyDeviceToHost, stream));
    TRY(cudaStreamSynchronize(stream));
    if (host[0] != 2)
        fail_msg("the result is %g", (double)host[0]);
done:
    if (played)
        (void)cudaGraphExecDestroy(played);
    if (graph)
        (void)cudaGraphDestroy(graph);
    if (event)
        (void)cudaEventDestroy(event);
    if (stream)
        (void)cudaStreamDestroy(stream);
    (void)cudaFreeHost(host);
    (void)cudaFree(x);
    return errors[*n_errors - 1];
#undef TRY
}

static void every_call_fails_in_turn(void **state)
{
    (void)state;
    static const cudaError_t expected[] = {
        cudaErrorInvalidValue,     cudaErrorMemoryAllocation, cudaErrorMemoryAllocation, cudaErrorMemoryAllocation,
        cudaErrorMemoryAllocation, cudaErrorLaunchFailure,    cudaErrorLaunchFailure,    cudaErrorLaunchFailure,
        cudaErrorLaunchFailure,    cudaErrorMemoryAllocation, cudaErrorMemoryAllocation, cudaErrorMemoryAllocation,
        cudaErrorMemoryAllocation, cudaErrorLaunchFailure,    cudaErrorLaunchFailure,    cudaErrorLaunchFailure,
    };
    enum { N_CALLS = sizeof expected / sizeof *expected };
    const size_t n_before = emulation_n_objects();
    cudaError_t errors[N_CALLS + 4];
    for (int n = 1; n <= N_CALLS + 1; n++) {
        int n_errors;
        emulation_fail_call((uint64_t)n);
        const cudaError_t error = some_of_everything(errors, &n_errors);
        assert_int_equal(emulation_call_failed(), n <= N_CALLS);
        assert_int_equal(n_errors, n <= N_CALLS ? n : N_CALLS);
        if (error != (n <= N_CALLS ? expected[n - 1] : cudaSuccess))
            fail_msg("call %d: %s", n, cudaGetErrorName(error));
        emulation_fail_call(0);
        /* a device that fails at work is lost */
        assert_int_equal(cudaDeviceSynchronize(), error == cudaErrorLaunchFailure ? error : cudaSuccess);
        emulation_restore_device();
        assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
        assert_int_equal(emulation_n_objects(), n_before);
    }
}

static void a_lost_device(void **state)
{
    (void)state;
    float *x = device_new(NULL, n_bytes);
    void *more = NULL;
    int n;
    cublasHandle_t blas = NULL;
    emulation_lose_device();
    assert_int_equal(kernels_scale(NULL, x, N, 1), cudaErrorIllegalAddress);
    assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress); /* and again */
    assert_int_equal(cudaMalloc(&more, 1), cudaErrorIllegalAddress);
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorIllegalAddress);
    assert_int_equal(cublasCreate(&blas), CUBLAS_STATUS_NOT_INITIALIZED);
    assert_int_equal(cudaFree(x), cudaErrorIllegalAddress);
    assert_null(more);
    assert_null(blas);
    emulation_restore_device();
    assert_int_equal(cudaFree(x), cudaErrorInvalidValue); /* it was freed */
    (void)cudaGetLastError();
}

/* What a process says that starts with such an environment: "count error driver free_bytes launches", launches of at most 3. */
static void say_machine(const char *variable, const char *value, char *line, size_t line_size)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        setenv(variable, value, 1);
        execl("/proc/self/exe", "self", "--say-machine", (char *)NULL);
        _exit(1);
    }
    close(ends[1]);
    FILE *said = fdopen(ends[0], "r");
    assert_non_null(said);
    const size_t n = fread(line, 1, line_size - 1, said);
    line[n] = '\0';
    fclose(said);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static int describe_machine(void)
{
    int n = -1, driver = -1, n_launches = 0;
    size_t free_bytes = 0, total_bytes;
    float *x = NULL;
    const cudaError_t error = cudaGetDeviceCount(&n);
    (void)cudaDriverGetVersion(&driver);
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    if (cudaMalloc((void **)&x, n_bytes) == cudaSuccess)
        while (n_launches < 3 && kernels_scale(NULL, x, N, 1) == cudaSuccess)
            n_launches++;
    (void)cudaFree(x);
    printf("%d %d %d %zu %d", n, (int)error, driver, free_bytes, n_launches);
    return 0;
}

static void machines_by_the_environment(void **state)
{
    (void)state;
    static const struct {
        const char *variable, *value, *said;
    } rows[] = {
        {"HCATTN_TEST_CUDA_BYTES", "1000", "1 0 13000 1000 3"},
        {"HCATTN_TEST_CUDA_NO_DEVICE", "driver", "0 35 0 0 0"},
        {"HCATTN_TEST_CUDA_NO_DEVICE", "old", "0 35 12020 0 0"},
        {"HCATTN_TEST_CUDA_NO_DEVICE", "none", "0 100 13000 0 0"},
        {"HCATTN_TEST_CUDA_NO_DEVICE", "busy", "0 46 13000 0 0"},
        {"HCATTN_TEST_CUDA_FAIL_AFTER", "3", "1 0 13000 8589934592 2"},
        {"CUDA_VISIBLE_DEVICES", "0,1", "1 0 13000 8589934592 3"},
        {"CUDA_VISIBLE_DEVICES", "GPU-e0e0", "1 0 13000 8589934592 3"},
        {"CUDA_VISIBLE_DEVICES", "", "0 100 13000 0 0"},
        {"CUDA_VISIBLE_DEVICES", "-1,0", "0 100 13000 0 0"},
        {"CUDA_VISIBLE_DEVICES", "GPU-77", "0 100 13000 0 0"},
        {"CUDA_VISIBLE_DEVICES", "NoDevFiles", "0 100 13000 0 0"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char said[256];
        say_machine(rows[i].variable, rows[i].value, said, sizeof said);
        if (strcmp(said, rows[i].said) != 0)
            fail_msg("%s=%s: \"%s\" instead of \"%s\"", rows[i].variable, rows[i].value, said, rows[i].said);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--say-machine") == 0)
        return describe_machine();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_graph_plays_what_was_captured), cmocka_unit_test(what_a_capture_does_not_take),
        cmocka_unit_test(a_capture_belongs_to_a_thread),   cmocka_unit_test(threads_take_turns),
        cmocka_unit_test(every_call_fails_in_turn),        cmocka_unit_test(a_lost_device),
        cmocka_unit_test(machines_by_the_environment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
