/*
 * emulation_streams.cpp - streams, events, captures and graphs of the emulated device. See cuda_runtime_api.h.
 *
 * Invariant  what is given to a stream is done before the call returns; only a capture keeps it. A graph is what a capture
 *            wrote down, in order, arguments by value; memory it points to is checked anew whenever it is played.
 */
#include "tests/backend/cuda-on-cpu/emulation.h"

#include <string.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

typedef std::vector<std::function<void()>> operations;

struct CUstream_st {
    unsigned int flags;
    bool captures, spoiled;
    enum cudaStreamCaptureMode mode;
    std::thread::id captured_by;
    uint64_t capture; /* a number of its own */
    std::shared_ptr<operations> recorded;
};

struct CUevent_st {
    bool recorded, timed;
    uint64_t capture; /* in which it was recorded; 0: none */
    struct timespec at;
};

struct CUgraph_st {
    std::shared_ptr<const operations> played;
};

struct CUgraphExec_st {
    std::shared_ptr<const operations> played;
};

static std::vector<cudaStream_t> capturing;
static uint64_t n_captures;
static size_t n_objects;

extern "C" size_t emulation_n_objects(void)
{
    return n_objects + emulation_n_ranges();
}

void emulation_count_object(int more)
{
    n_objects += (size_t)more;
}

/* ---- what captures forbid ---- */

bool emulation_is_recording(cudaStream_t stream)
{
    return stream && stream->captures;
}

void emulation_record(cudaStream_t stream, std::function<void()> operation)
{
    stream->recorded->push_back(std::move(operation));
}

cudaError_t emulation_spoil(cudaStream_t stream, cudaError_t error)
{
    stream->spoiled = true;
    return emulation_error(error);
}

cudaError_t emulation_capture_forbids(void)
{
    cudaError_t error = cudaSuccess;
    for (cudaStream_t stream : capturing)
        if (stream->mode == cudaStreamCaptureModeGlobal ||
            (stream->mode == cudaStreamCaptureModeThreadLocal && stream->captured_by == std::this_thread::get_id()))
            error = emulation_spoil(stream, cudaErrorStreamCaptureUnsupported);
    return error;
}

cudaError_t emulation_legacy_forbids(void)
{
    cudaError_t error = cudaSuccess;
    for (cudaStream_t stream : capturing)
        if (!(stream->flags & cudaStreamNonBlocking))
            error = emulation_spoil(stream, cudaErrorStreamCaptureImplicit);
    return error;
}

static cudaError_t begin_work(cudaStream_t stream, cudaError_t error)
{
    if (error)
        return emulation_is_recording(stream) ? emulation_spoil(stream, error) : error;
    if (!stream)
        return emulation_legacy_forbids();
    return stream->captures && stream->spoiled ? emulation_error(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

cudaError_t emulation_begin_work(cudaStream_t stream)
{
    return begin_work(stream, emulation_begin(emulation_is_recording(stream) ? EMULATION_RECORDS : EMULATION_WORKS));
}

static cudaError_t begin_launch(cudaStream_t stream)
{
    return begin_work(stream,
                      emulation_is_recording(stream) ? emulation_begin(EMULATION_RECORDS) : emulation_begin_launch());
}

void emulation_launch(const struct emulation_kernel *kernel, cudaStream_t stream, const void *call, size_t n_bytes)
{
    cudaError_t error = begin_launch(stream);
    if (!error)
        error = emulation_check_launch(kernel);
    if (error) {
        (void)(emulation_is_recording(stream) ? emulation_spoil(stream, error) : emulation_error(error));
        return;
    }
    kernel->check(kernel->name, call);
    if (!emulation_is_recording(stream)) {
        emulation_run(kernel, call);
        return;
    }
    const std::shared_ptr<unsigned char[]> kept(new unsigned char[n_bytes]); /* aligned for anything */
    memcpy(kept.get(), call, n_bytes);
    emulation_record(stream, [kernel = *kernel, kept] {
        kernel.check(kernel.name, kept.get());
        emulation_run(&kernel, kept.get());
    });
}

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    const cudaError_t error = emulation_begin(EMULATION_CREATES);
    if (error)
        return error;
    *stream = new CUstream_st{};
    (*stream)->flags = flags;
    n_objects++;
    return cudaSuccess;
}

static void end_capture(cudaStream_t stream)
{
    capturing.erase(std::remove(capturing.begin(), capturing.end(), stream), capturing.end());
    stream->captures = stream->spoiled = false;
    stream->recorded.reset();
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    const cudaError_t error = emulation_begin(EMULATION_DESTROYS);
    if (!stream)
        return emulation_error(cudaErrorInvalidResourceHandle);
    end_capture(stream);
    delete stream;
    n_objects--;
    return error;
}

/* Waiting for, or asking after, a stream (NULL: all of them) or what a stream did. */
static cudaError_t begin_wait(cudaStream_t stream, bool all)
{
    cudaError_t error = emulation_begin(EMULATION_WAITS);
    if (error)
        return error;
    for (cudaStream_t captures : capturing)
        if (all || captures == stream)
            error = emulation_spoil(captures, cudaErrorStreamCaptureUnsupported);
    if (!error && !stream)
        error = emulation_legacy_forbids();
    if (!error)
        emulation_waited();
    return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return begin_wait(stream, false);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return begin_wait(stream, false);
}

cudaError_t cudaDeviceSynchronize(void)
{
    return begin_wait(NULL, true);
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    const cudaError_t error = emulation_begin(EMULATION_CREATES);
    if (error)
        return error;
    *event = new CUevent_st{false, !(flags & cudaEventDisableTiming), 0, {}};
    n_objects++;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    const cudaError_t error = emulation_begin(EMULATION_DESTROYS);
    if (!event)
        return emulation_error(cudaErrorInvalidResourceHandle);
    delete event;
    n_objects--;
    return error;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    if (!event)
        return emulation_error(cudaErrorInvalidResourceHandle);
    const cudaError_t error = emulation_begin_work(stream);
    if (error)
        return error;
    event->capture = emulation_is_recording(stream) ? stream->capture : 0;
    event->recorded = true;
    clock_gettime(CLOCK_MONOTONIC, &event->at);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    (void)flags;
    if (!event)
        return emulation_error(cudaErrorInvalidResourceHandle);
    const cudaError_t error = emulation_begin_work(stream);
    if (error)
        return error;
    const uint64_t mine = emulation_is_recording(stream) ? stream->capture : 0;
    if (event->capture == mine)
        return cudaSuccess;
    if (mine)
        return emulation_spoil(stream, cudaErrorStreamCaptureIsolation);
    for (cudaStream_t captures : capturing)
        if (captures->capture == event->capture)
            emulation_fail("a stream joins the capture of another one, which is not emulated");
    return emulation_error(cudaErrorCapturedEvent);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (!event)
        return emulation_error(cudaErrorInvalidResourceHandle);
    const cudaError_t error = emulation_begin(EMULATION_WAITS);
    if (!error && !event->capture)
        emulation_waited();
    if (error || !event->capture)
        return error;
    for (cudaStream_t captures : capturing)
        if (captures->capture == event->capture)
            captures->spoiled = true;
    return emulation_error(cudaErrorCapturedEvent);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return cudaEventQuery(event);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    const cudaError_t error = emulation_begin(EMULATION_ASKS);
    if (error)
        return error;
    if (!start || !end || !start->recorded || !end->recorded || !start->timed || !end->timed || start->capture ||
        end->capture)
        return emulation_error(cudaErrorInvalidResourceHandle);
    *milliseconds = (float)((double)(end->at.tv_sec - start->at.tv_sec) * 1e3 +
                            (double)(end->at.tv_nsec - start->at.tv_nsec) * 1e-6);
    return cudaSuccess;
}

/* ---- captures and graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    const cudaError_t error = emulation_begin(EMULATION_CREATES);
    if (error)
        return error;
    if (!stream)
        return emulation_error(cudaErrorStreamCaptureUnsupported);
    if (stream->captures)
        return emulation_error(cudaErrorIllegalState);
    stream->captures = true;
    stream->mode = mode;
    stream->captured_by = std::this_thread::get_id();
    stream->capture = ++n_captures;
    stream->recorded = std::make_shared<operations>();
    capturing.push_back(stream);
    return cudaSuccess;
}

/* The capture ends whatever else is wrong, but not by another thread. */
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    if (!stream || !stream->captures)
        return emulation_error(stream ? cudaErrorIllegalState : cudaErrorInvalidValue);
    if (stream->mode != cudaStreamCaptureModeRelaxed && stream->captured_by != std::this_thread::get_id())
        return emulation_error(cudaErrorStreamCaptureWrongThread);
    const bool spoiled = stream->spoiled;
    const std::shared_ptr<const operations> recorded = stream->recorded;
    end_capture(stream);
    *graph = NULL;
    const cudaError_t error = emulation_begin(EMULATION_CREATES);
    if (error || spoiled)
        return error ? error : emulation_error(cudaErrorStreamCaptureInvalidated);
    *graph = new CUgraph_st{recorded};
    n_objects++;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    const cudaError_t error = emulation_begin(EMULATION_ASKS);
    if (error)
        return error;
    *status = !emulation_is_recording(stream) ? cudaStreamCaptureStatusNone
              : stream->spoiled               ? cudaStreamCaptureStatusInvalidated
                                              : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n_nodes)
{
    const cudaError_t error = emulation_begin(EMULATION_ASKS);
    if (error)
        return error;
    if (!graph || !n_nodes || nodes)
        return emulation_error(cudaErrorInvalidValue);
    *n_nodes = graph->played->size();
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    const cudaError_t error = emulation_begin(EMULATION_DESTROYS);
    if (!graph)
        return emulation_error(cudaErrorInvalidValue);
    delete graph;
    n_objects--;
    return error;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
    const cudaError_t error = emulation_begin(EMULATION_CREATES);
    if (error)
        return error;
    if (!graph || flags)
        return emulation_error(cudaErrorInvalidValue);
    *executable = new CUgraphExec_st{graph->played};
    n_objects++;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    if (!executable)
        return emulation_error(cudaErrorInvalidValue);
    const cudaError_t error = begin_launch(stream);
    if (error)
        return error;
    const auto play = [played = executable->played] {
        for (const auto &operation : *played)
            operation();
    };
    if (emulation_is_recording(stream))
        emulation_record(stream, play);
    else
        play();
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    const cudaError_t error = emulation_begin(EMULATION_DESTROYS);
    if (!executable)
        return emulation_error(cudaErrorInvalidValue);
    delete executable;
    n_objects--;
    return error;
}
