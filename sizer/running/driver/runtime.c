/* A CUDA runtime and driver that account for memory and compute nothing.

   Preloaded under the name of libcudart, it lets PyTorch's own CUDA build run on a machine without a GPU: every operator
   takes the host code that it takes on a device (dispatch, choice of kernel, sizes of workspaces, the caching allocator),
   every launch and every library call returns at once, and nothing is written. So what is allocated, freed and kept is
   PyTorch's own doing, and what a tensor on the device holds is zeros. Control flow that reads device memory is therefore
   not to be trusted, and neither are timings; nothing that runs over this is a measurement of a device.

   "Device memory" is reserved address space without pages behind it, so 80 GiB cost nothing. Copies to and from it are made
   up to a number of bytes, beyond which the pages would be real.

   The environment describes the device (device.h) and sets what follows:
     NULL_CONTEXT_BYTES  bytes of each device that are taken from the start, by the context
     NULL_COPIED_BYTES   bytes of the largest copy that is made, 64 MiB by default
     NULL_UNBOUNDED      if 1, allocations succeed beyond the memory of the device
   Types and constants are those of NVIDIA's own headers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>

#include "device.h"

#if defined(__x86_64__) && defined(__GLIBC__)
/* glibc 2.34 moved these two; a library that asks for their first versions runs with older ones, too. */
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlvsym, dlvsym@GLIBC_2.2.5");
#endif

#define EXPORT __attribute__((visibility("default")))
#define MIB ((size_t)1 << 20)
#define SPACE ((size_t)1 << 45)    /* address space of all devices: 32 TiB or what the system gives, never handed out twice */
#define LEAST ((size_t)1 << 38)
#define SEGMENT (2 * MIB)          /* the driver's own granularity for what the caching allocator asks for */
#define RISING (20 * MIB)
#define CHUNKS 65536

static char *space;
static size_t space_bytes, share;  /* of the address space: all of it, and the part of one device */
static size_t above[MAX_DEVICES], below[MAX_DEVICES]; /* of a device's share, on both sides of its middle */
static size_t used[MAX_DEVICES], most_used[MAX_DEVICES]; /* of a device's memory */
static size_t copied_limit, pinned_bytes, most_pinned;
static int unbounded;
static struct { char *at; size_t bytes; } chunks[CHUNKS], pinned[CHUNKS]; /* of the device, of the host */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread cudaError_t last_error;
static __thread int current; /* the device of this thread */

__attribute__((constructor)) static void begin(void) {
    copied_limit = number_from("NULL_COPIED_BYTES", 64 * MIB), unbounded = (int)number_from("NULL_UNBOUNDED", 0);
    if (!device.count) return;
    for (space_bytes = SPACE; space_bytes >= LEAST; space_bytes /= 2) {
        space = mmap(NULL, space_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space != MAP_FAILED) break;
    }
    if (space_bytes < LEAST) { /* vm.overcommit_memory=2, or a limit on address space */
        space = NULL, space_bytes = 0, device.count = 0;
        return;
    }
    char *aligned = (char *)(((uintptr_t)space + SEGMENT - 1) & ~(SEGMENT - 1));
    space_bytes -= SEGMENT, space = aligned, share = space_bytes / device.count / SEGMENT * SEGMENT;
    for (int i = 0; i < device.count; i++) used[i] = most_used[i] = number_from("NULL_CONTEXT_BYTES", 0);
}

/* --- for the process that runs a script: sizer/running/script_child.py --------------------------------------------------------- */

EXPORT size_t null_space(void) { return space_bytes; }
EXPORT void null_compiled(int arch) { device.compiled = arch; } /* the kernels of PyTorch that the device runs, 75 for sm_75 */
EXPORT size_t null_used(int at) { return at >= 0 && at < MAX_DEVICES ? used[at] : 0; }
EXPORT size_t null_most_used(int at) { return at >= 0 && at < MAX_DEVICES ? most_used[at] : 0; }
EXPORT size_t null_most_pinned(void) { return most_pinned; }

/* The caller holds the lock. */
static int has_room(int at, size_t bytes) { return unbounded || used[at] + bytes <= device.total; }
static void take(int at, size_t bytes) {
    used[at] += bytes;
    if (used[at] > most_used[at]) most_used[at] = used[at];
}

static cudaError_t say(cudaError_t error) { return last_error = error; }
static int on_device(const void *at) { return (const char *)at >= space && (const char *)at < space + space_bytes; }
static int device_of(const void *at) { return (int)((size_t)((const char *)at - space) / share); }

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* Address space of the current device only; the caller holds the lock. As on a T4 (sizer/allocator/cuda.py): from the middle upwards what is of 20 MiB or
   less, what is larger from the middle downwards. */
static char *reserve(size_t bytes) {
    size_t whole = (bytes + SEGMENT - 1) & ~(SEGMENT - 1), *taken = bytes <= RISING ? &above[current] : &below[current];
    if (!share || *taken + whole > share / 2 - SEGMENT) return NULL;
    *taken += whole;
    char *middle = space + current * share + share / 2 / SEGMENT * SEGMENT;
    return bytes <= RISING ? middle + above[current] - whole : middle - below[current];
}

EXPORT cudaError_t cudaMalloc(void **at, size_t bytes) {
    cudaError_t error = cudaErrorMemoryAllocation;
    *at = NULL;
    if (!bytes) return cudaSuccess;
    pthread_mutex_lock(&lock);
    if (has_room(current, bytes))
        for (int i = 0; i < CHUNKS; i++)
            if (!chunks[i].at) {
                if ((*at = chunks[i].at = reserve(bytes))) take(current, chunks[i].bytes = bytes), error = cudaSuccess;
                break;
            }
    pthread_mutex_unlock(&lock);
    return error ? say(error) : error;
}

EXPORT cudaError_t cudaFree(void *at) {
    cudaError_t error = at ? cudaErrorInvalidValue : cudaSuccess;
    pthread_mutex_lock(&lock);
    for (int i = 0; at && i < CHUNKS; i++)
        if (chunks[i].at == at) {
            madvise(at, chunks[i].bytes, MADV_DONTNEED);
            used[device_of(at)] -= chunks[i].bytes, chunks[i].at = NULL, error = cudaSuccess;
            break;
        }
    pthread_mutex_unlock(&lock);
    return error ? say(error) : error;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = device.total, *free_bytes = used[current] < device.total ? device.total - used[current] : 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned flags) {
    if (posix_memalign(at, 4096, bytes ? bytes : 1)) return say(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CHUNKS; i++)
        if (!pinned[i].at) {
            pinned[i].at = *at, pinned[i].bytes = bytes, pinned_bytes += bytes;
            if (pinned_bytes > most_pinned) most_pinned = pinned_bytes;
            break;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMallocHost(void **at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }
EXPORT cudaError_t cudaFreeHost(void *at) {
    pthread_mutex_lock(&lock);
    for (int i = 0; at && i < CHUNKS; i++)
        if (pinned[i].at == at) pinned[i].at = NULL, pinned_bytes -= pinned[i].bytes;
    pthread_mutex_unlock(&lock);
    free(at);
    return cudaSuccess;
}
static int is_pinned(const char *at) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < CHUNKS && !found; i++) found = pinned[i].at && at >= pinned[i].at && at < pinned[i].at + pinned[i].bytes;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Copies of 8 bytes or fewer to the host, for which PyTorch's own code waits: how many elements a kernel has counted, `item`.
   With `null_follow(1)` such a copy brings, in this order,
     the next number of `null_answer`, with which Python says what the kernel would have counted;
     the bytes of the device, if they are in one of the places of `null_real`, the small tensors that Python hands to the function,
       or if they came from the host and no kernel was launched since (DDP sends the sizes of its buckets so);
     0, not what the block held before. `null_blind` counts these copies. */
#define MAX_ANSWERS 64
#define MAX_PLACES 16
static int following;
static __thread int64_t answers[MAX_ANSWERS];
static __thread int answer_next, answer_count, place_count;
static __thread uintptr_t places[2 * MAX_PLACES];
static unsigned long long blind;
EXPORT void null_follow(int on) { following = on; }
EXPORT void null_answer(const int64_t *values, int count) {
    answer_next = 0, answer_count = count < MAX_ANSWERS ? count : MAX_ANSWERS;
    if (answer_count) memcpy(answers, values, answer_count * sizeof *answers);
}
EXPORT int null_answered(void) { return answer_next; }
EXPORT void null_real(const uintptr_t *bounds, int count) { /* begin and end of each place */
    place_count = count < MAX_PLACES ? count : MAX_PLACES;
    if (place_count) memcpy(places, bounds, 2 * place_count * sizeof *places);
}
EXPORT unsigned long long null_blind(void) { return blind; }

#define SENT 64
static unsigned long long launches;
static struct { uintptr_t at; size_t bytes; unsigned long long launches; } sent[SENT]; /* the latest copies from the host */
static int sent_next;
static void note_sent(const void *at, size_t bytes) { /* threads may overwrite each other's entry: then a value is 0 */
    int i = __atomic_fetch_add(&sent_next, 1, __ATOMIC_RELAXED) & (SENT - 1);
    sent[i].at = (uintptr_t)at, sent[i].bytes = bytes, sent[i].launches = launches;
}
static int is_real(uintptr_t at) {
    for (int i = 0; i < SENT; i++)
        if (sent[i].bytes && sent[i].launches == launches && at >= sent[i].at && at < sent[i].at + sent[i].bytes) return 1;
    for (int i = 0; i < place_count; i++)
        if (at >= places[2 * i] && at < places[2 * i + 1]) return 1;
    return 0;
}
static void copy(void *to, const void *from, size_t bytes) {
    if (!to || !from) return;
    if (following && bytes <= 8 && on_device(from) && !on_device(to)) {
        if (answer_next < answer_count) { memcpy(to, &answers[answer_next++], bytes); return; }
        if (!is_real((uintptr_t)from)) { blind++; memset(to, 0, bytes); return; }
    }
    if (bytes > copied_limit) return;
    memmove(to, from, bytes);
    if (following && on_device(to) && !on_device(from)) note_sent(to, bytes);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int d, const void *from, int e, size_t bytes, cudaStream_t s) {
    copy(to, from, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    copy(to, from, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
    copy(to, from, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void *at, int value, size_t bytes) {
    if (bytes <= copied_limit) memset(at, value, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t s) { return cudaMemset(at, value, bytes); }

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *at) {
    memset(out, 0, sizeof *out);
    out->type = on_device(at) ? cudaMemoryTypeDevice : is_pinned(at) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->device = on_device(at) ? device_of(at) : 0;
    out->devicePointer = on_device(at) ? (void *)at : NULL;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) {
    pthread_mutex_lock(&lock);
    *at = reserve(SEGMENT);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* --- the device ---------------------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaGetDeviceCount(int *count) { *count = device.count; return device.count ? cudaSuccess : say(cudaErrorNoDevice); }
EXPORT cudaError_t cudaGetDevice(int *at) { *at = current; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int at) {
    if (at < 0 || at >= device.count) return say(cudaErrorInvalidDevice);
    current = at;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int index) {
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", device.name);
    out->major = device.major, out->minor = device.minor;
    out->totalGlobalMem = device.total;
    out->multiProcessorCount = device.processors;
    out->maxThreadsPerMultiProcessor = device.threads;
    out->sharedMemPerMultiprocessor = (size_t)device.shared_kib * 1024;
    out->sharedMemPerBlockOptin = (size_t)(device.shared_kib - device.reserved_kib) * 1024;
    out->sharedMemPerBlock = 48 * 1024;
    out->reservedSharedMemPerBlock = (size_t)device.reserved_kib * 1024;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->warpSize = 32;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024, out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 2147483647, out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->maxBlocksPerMultiProcessor = device.blocks;
    out->totalConstMem = 65536;
    out->textureAlignment = 512, out->texturePitchAlignment = 32;
    out->l2CacheSize = device.l2_kib * 1024;
    out->memoryBusWidth = 5120;
    out->unifiedAddressing = out->managedMemory = out->concurrentManagedAccess = 1;
    out->concurrentKernels = out->canMapHostMemory = out->cooperativeLaunch = out->streamPrioritiesSupported = 1;
    out->asyncEngineCount = 3;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int index) {
    struct cudaDeviceProp all;
    cudaGetDeviceProperties(&all, index);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = device.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = device.processors; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = device.threads; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = all.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = all.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = all.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = all.reservedSharedMemPerBlock; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = all.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxGridDimX: *value = all.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = all.maxGridSize[1]; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrL2CacheSize: *value = all.l2CacheSize; break;
    case cudaDevAttrClockRate: *value = 1755000; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrManagedMemory: *value = 1; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *out, int bytes, int index) {
    snprintf(out, bytes, "0000:%02x:00.0", index);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 0; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

/* --- errors, streams, events ---------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }
EXPORT const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error ? "cudaErrorUnknown" : "cudaSuccess";
}
EXPORT const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : error ? "an error of the null driver" : "no error";
}

static void *handle(void) { return calloc(1, 4096); } /* opaque to PyTorch; large enough for what libraries look into */

/* Where NULL_EVENTS_PENDING is set, work is done only once somebody waits for it. A stream does its work in order; each event
   knows how many of those recorded on each stream have happened where it has. */
#define STREAMS 256
struct event { int stream; unsigned number, after[STREAMS]; unsigned long long capture; };
static unsigned after[STREAMS][STREAMS], done[STREAMS];
static cudaStream_t streams[STREAMS]; /* the first is the default one */
static pthread_mutex_t events = PTHREAD_MUTEX_INITIALIZER;
static unsigned long long captures, captured[STREAMS]; /* captures begun; by stream the one that it is part of, 0 for none */

static int number_of(cudaStream_t stream) { /* the caller holds the lock */
    int number = 0;
    while (number < STREAMS - 1 && streams[number] != stream) number++;
    return number;
}
static cudaError_t created(cudaStream_t *out) {
    *out = handle();
    pthread_mutex_lock(&events);
    for (int i = 1; i < STREAMS; i++)
        if (!streams[i]) { streams[i] = *out; break; }
    pthread_mutex_unlock(&events);
    return cudaSuccess;
}
static void merge(unsigned *into, const unsigned *from) {
    for (int i = 0; i < STREAMS; i++)
        if (into[i] < from[i]) into[i] = from[i];
}
static void record(struct event *event, cudaStream_t stream) {
    pthread_mutex_lock(&events);
    event->stream = number_of(stream);
    event->number = ++after[event->stream][event->stream];
    event->capture = captured[event->stream];
    memcpy(event->after, after[event->stream], sizeof event->after);
    pthread_mutex_unlock(&events);
}
static cudaError_t wait_for(const struct event *event) {
    pthread_mutex_lock(&events);
    merge(done, event->after);
    pthread_mutex_unlock(&events);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *out) { return created(out); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned f) { return created(out); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned f, int p) { return created(out); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
/* Captures of CUDA graphs: nothing is captured. A stream says that it is, and so do those that wait for its events, until the
   capture ends; what is allocated meanwhile comes from a private pool, which is PyTorch's own doing. */
static unsigned long long capture_of(cudaStream_t stream) {
    pthread_mutex_lock(&events);
    unsigned long long found = captured[number_of(stream)];
    pthread_mutex_unlock(&events);
    return found;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *out) {
    *out = capture_of(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *out, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
    unsigned long long found = capture_of(s);
    *out = found ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = found;
    if (graph) *graph = found ? (cudaGraph_t)space : NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    pthread_mutex_lock(&events);
    captured[number_of(stream)] = ++captures;
    pthread_mutex_unlock(&events);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    pthread_mutex_lock(&events);
    unsigned long long ended = captured[number_of(stream)];
    for (int i = 0; i < STREAMS; i++)
        if (captured[i] == ended) captured[i] = 0;
    pthread_mutex_unlock(&events);
    *graph = handle();
    return ended ? cudaSuccess : say(cudaErrorIllegalState);
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = 1; /* PyTorch warns of a graph without nodes */
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    *out = handle();
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(out, graph, flags);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    static int pending = -1;
    if (pending < 0) pending = getenv("NULL_EVENTS_PENDING") != NULL;
    const struct event *one = (struct event *)event;
    return pending && one->number > done[one->stream] ? say(cudaErrorNotReady) : cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    record((struct event *)event, stream);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned f) {
    return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait_for((struct event *)event); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned f) {
    pthread_mutex_lock(&events);
    const struct event *one = (struct event *)event;
    merge(after[number_of(stream)], one->after);
    if (one->capture && captured[one->stream] == one->capture) captured[number_of(stream)] = one->capture;
    pthread_mutex_unlock(&events);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    struct event event;
    record(&event, stream);
    return wait_for(&event);
}
EXPORT cudaError_t cudaDeviceSynchronize(void) {
    for (int i = 0; i < STREAMS && (!i || streams[i]); i++) cudaStreamSynchronize(streams[i]);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *out) { *out = handle(); return cudaSuccess; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned f) { *out = handle(); return cudaSuccess; }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
/* One millisecond in all cases: scripts divide by it, and of the plans that torch.backends.cudnn.benchmark times the first wins. */
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { *ms = 1; return cudaSuccess; }

/* --- kernels --------------------------------------------------------------------------------------------------------- */

static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } configuration;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
    __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    return cudaSuccess;
}
EXPORT void **__cudaRegisterFatBinary(void *binary) { return handle(); }
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) { *out = (cudaKernel_t)function; return cudaSuccess; }

/* Nothing is compiled for this device, so registers and static shared memory of a kernel are not known: 32 and 0. */
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->binaryVersion = out->ptxVersion = device.compiled;
    out->maxDynamicSharedSizeBytes = (device.shared_kib - device.reserved_kib) * 1024;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *function, int threads,
                                                                          size_t shared, unsigned flags) {
    int by_threads = device.threads / (threads > 0 ? threads : 1);
    size_t each = shared + (size_t)device.reserved_kib * 1024;
    int by_shared = each ? (int)((size_t)device.shared_kib * 1024 / each) : device.blocks;
    *out = by_threads < by_shared ? by_threads : by_shared;
    if (*out > device.blocks) *out = device.blocks;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, function, threads, shared, 0);
}

/* --- cuBLAS and cuBLASLt: PyTorch allocates their workspaces, the libraries do not ---------------------------------------- */

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t *out) { *out = handle(); return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t it) { free(it); return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t it, cublasMath_t *out) { *out = 0; return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t it, cublasPointerMode_t *out) {
    *out = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t *out) { *out = handle(); return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *out, cublasComputeType_t c, cudaDataType_t t) {
    *out = handle();
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t it) { free(it); return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *out) {
    *out = handle();
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t it) { free(it); return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *out, cudaDataType t, uint64_t r, uint64_t c, int64_t ld) {
    *out = handle();
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t it) { free(it); return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t it, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                                     cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t e,
                                                     cublasLtMatmulPreference_t p, int asked,
                                                     cublasLtMatmulHeuristicResult_t results[], int *count) {
    memset(results, 0, sizeof *results);
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

/* cuDNN's engines for 1x1 convolutions and Winograd's transforms find cuBLASLt by dlopen and dlsym, in the library itself, which
   has no device to create a handle for: cuDNN would drop them without a word. So they find what PyTorch finds, here: one algorithm
   that needs no workspace. Descriptions of products are cuBLASLt's own, which need no device. */
EXPORT void *dlsym(void *library, const char *name) {
    static void *(*real)(void *, const char *);
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    for (int i = 0; !real && i < 3; i++) real = (__typeof__(real))dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    void *found = real(library, name);
    if (found && !strcmp(name, "cublasLtCreate")) return (void *)cublasLtCreate;
    if (found && !strcmp(name, "cublasLtMatmulAlgoGetHeuristic")) return (void *)cublasLtMatmulAlgoGetHeuristic;
    return found;
}

/* --- the driver's interface: asked for by name, for expandable segments and contexts ------------------------------------------ */

EXPORT CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = CUDART_VERSION; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *out, int index) { *out = index; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int *count) { *count = device.count; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice *out) { *out = current; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetName(char *out, int bytes, CUdevice d) { snprintf(out, bytes, "%s", device.name); return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice d) { *out = device.total; return CUDA_SUCCESS; }
EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return (CUresult)cudaMemGetInfo(free_bytes, total); }
EXPORT CUresult cuCtxGetCurrent(CUcontext *out) { *out = (CUcontext)space; return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) {
    *flags = 0, *active = 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice d) { *out = (CUcontext)space; return CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice d) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, d);
}
EXPORT CUresult cuGetErrorString(CUresult error, const char **out) {
    *out = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the null driver";
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
    *out = SEGMENT;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr at, unsigned long long f) {
    pthread_mutex_lock(&lock);
    *out = (CUdeviceptr)reserve(bytes);
    pthread_mutex_unlock(&lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *p, unsigned long long f) {
    CUresult error = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    int at = p && p->location.id >= 0 && p->location.id < device.count ? p->location.id : current;
    if (has_room(at, bytes)) take(at, bytes), *out = bytes + at, error = CUDA_SUCCESS; /* bytes are a multiple of SEGMENT */
    pthread_mutex_unlock(&lock);
    return error;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle bytes) { /* the handle of a piece: its size, and its device */
    pthread_mutex_lock(&lock);
    used[bytes % SEGMENT] -= bytes - bytes % SEGMENT;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* Engines that cuDNN compiles load their code through these. */
EXPORT CUresult cuGetErrorName(CUresult error, const char **out) { return cuGetErrorString(error, out); }
EXPORT CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *o, void **v, unsigned n, CUlibraryOption *l,
                                  void **lv, unsigned ln) {
    *out = handle();
    return CUDA_SUCCESS;
}
EXPORT CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name) { *out = handle(); return CUDA_SUCCESS; }
EXPORT CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel) { *out = (CUfunction)kernel; return CUDA_SUCCESS; }
EXPORT CUresult cuKernelGetAttribute(int *out, CUfunction_attribute a, CUkernel k, CUdevice d) { *out = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuFuncGetAttribute(int *out, CUfunction_attribute a, CUfunction f) { /* Triton reads them before a launch */
    *out = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadData(CUmodule *out, const void *code) { *out = handle(); return CUDA_SUCCESS; }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *out, const void *code, unsigned n, CUjit_option *o, void **v) {
    *out = handle();
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleGetFunction(CUfunction *out, CUmodule m, const char *name) { *out = handle(); return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction f, int threads, size_t shared) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(out, f, threads, shared);
}
/* The driver's private interfaces are not answered. */
EXPORT CUresult cuGetExportTable(const void **out, const CUuuid *id) { *out = NULL; return CUDA_ERROR_NOT_FOUND; }
EXPORT CUresult cuCtxGetLimit(size_t *out, CUlimit limit) { *out = 1024; return CUDA_SUCCESS; }

struct entry { const char *name; void *function; };
extern const struct entry null_entries[]; /* every cu* function here and in the stubs, ended by a NULL name */

static void *entry_of(const char *name) {
    for (const struct entry *entry = null_entries; entry->name; entry++)
        if (!strcmp(entry->name, name)) return entry->function;
    return NULL;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long f,
                                                    enum cudaDriverEntryPointQueryResult *status) {
    *out = entry_of(name);
    if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* --- cuDNN: its own heuristics, asked for a described device as its deviceless compilation allows --------------------------

   "Deviceless ahead-of-time compilation" (cuDNN 9.8 on) takes a device as JSON where it would take a handle, so engines,
   their order and the sizes of their workspaces are cuDNN's own. Only what needs a handle is answered here. */

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) { /* PyTorch has loaded the library by the time it calls it */
    void *library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
    return dlsym(library, name);
}

static cudnnBackendDescriptor_t described_device(void) {
    static cudnnBackendDescriptor_t described;
    static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&making);
    if (!described) {
        cudnnBackendDescriptor_t made = NULL;
        if (REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &made) ||
            REAL(cudnnBackendSetAttribute)(made, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, strlen(device.json), device.json) ||
            REAL(cudnnBackendFinalize)(made))
            fprintf(stderr, "null driver: cuDNN refuses this device\n"), abort();
        described = made;
    }
    pthread_mutex_unlock(&making);
    return described;
}

EXPORT cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t it, cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    cudnnBackendDescriptor_t device = NULL;
    cudnnBackendAttributeName_t described = 0;
    if (name == CUDNN_ATTR_OPERATIONGRAPH_HANDLE) return CUDNN_STATUS_SUCCESS;
    if (name == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) described = CUDNN_ATTR_ENGINEHEUR_DEVICEPROP;
    if (name == CUDNN_ATTR_ENGINE_OPERATION_GRAPH) described = CUDNN_ATTR_ENGINE_DEVICEPROP;
    if (name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE) described = CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP;
    if (described) {
        device = described_device();
        cudnnStatus_t status = REAL(cudnnBackendSetAttribute)(it, described, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
        if (status || name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE) return status;
    }
    return REAL(cudnnBackendSetAttribute)(it, name, type, count, values);
}
EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t p, cudnnBackendDescriptor_t v) {
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t *out) { *out = handle(); return CUDNN_STATUS_SUCCESS; }
EXPORT cudnnStatus_t cudnnDestroy(cudnnHandle_t it) { free(it); return CUDNN_STATUS_SUCCESS; }
EXPORT cudnnStatus_t cudnnSetStream(cudnnHandle_t it, cudaStream_t s) { return CUDNN_STATUS_SUCCESS; }
EXPORT cudnnStatus_t cudnnGetStream(cudnnHandle_t it, cudaStream_t *out) { *out = NULL; return CUDNN_STATUS_SUCCESS; }

/* cuDNN's own function reads the device of a handle. NVIDIA does not publish the size; a guess: 16 bytes for each of 2,048 threads. */
EXPORT cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t h, size_t *out) {
    *out = (size_t)device.processors * 2048 * 16;
    return CUDNN_STATUS_SUCCESS;
}
/* PyTorch describes the dropout of each call before it asks for sizes (aten/src/ATen/native/cudnn/RNN.cpp, 2.15). */
static __thread float dropped;
EXPORT cudnnStatus_t cudnnSetDropoutDescriptor(cudnnDropoutDescriptor_t it, cudnnHandle_t h, float p, void *states, size_t bytes,
                                               unsigned long long seed) {
    dropped = p;
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnRestoreDropoutDescriptor(cudnnDropoutDescriptor_t it, cudnnHandle_t h, float p, void *states,
                                                   size_t bytes, unsigned long long seed) {
    dropped = p;
    return CUDNN_STATUS_SUCCESS;
}
/* As above. A model in place of cuDNN's answer: that of sizer/tracing/cuda/recurrent.py. */
EXPORT cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t h, cudnnRNNDescriptor_t rnn, cudnnForwardMode_t trains,
                                               cudnnRNNDataDescriptor_t data, size_t *work, size_t *reserve) {
    static const int kept[] = {1, 1, 5, 4}, gates[] = {1, 1, 4, 3}; /* by cudnnRNNMode_t: relu, tanh, LSTM, GRU */
    cudnnRNNAlgo_t algo;
    cudnnRNNMode_t mode;
    cudnnRNNBiasMode_t bias;
    cudnnDirectionMode_t ways;
    cudnnRNNInputMode_t input;
    cudnnDataType_t type, precision;
    cudnnMathType_t math;
    cudnnDropoutDescriptor_t dropout;
    cudnnRNNDataLayout_t layout;
    int32_t in = 0, hidden = 0, projected = 0, layers = 0;
    uint32_t flags;
    int longest = 0, samples = 0, width = 0, *lengths;
    size_t tokens = 0;
    double fill;
    REAL(cudnnGetRNNDescriptor_v8)(rnn, &algo, &mode, &bias, &ways, &input, &type, &precision, &math, &in, &hidden, &projected, &layers,
                                   &dropout, &flags);
    REAL(cudnnGetRNNDataDescriptor)(data, &type, &layout, &longest, &samples, &width, 0, NULL, &fill);
    lengths = calloc(samples + 1, sizeof *lengths);
    REAL(cudnnGetRNNDataDescriptor)(data, &type, &layout, &longest, &samples, &width, samples, lengths, &fill);
    for (int i = 0; i < samples; i++) tokens += lengths[i];
    free(lengths);
    size_t item = type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_FLOAT ? 4 : 2, both = ways == CUDNN_BIDIRECTIONAL ? 2 : 1;
    size_t out = projected ? projected : hidden;
    *work = tokens * hidden * gates[mode] * both * item;
    if (reserve)
        *reserve = trains == CUDNN_FWD_MODE_TRAINING ? tokens * both * item * (hidden * kept[mode] * layers + out * (layers - 1) * (dropped > 0 ? 2 : 1)) : 0;
    return CUDNN_STATUS_SUCCESS;
}

/* Only cuDNN knows the workspaces of CTC losses, and reads the device of a handle for it. */
EXPORT int null_ctc; /* whether one was asked for */
EXPORT cudnnStatus_t cudnnGetCTCLossWorkspaceSize(cudnnHandle_t h, const cudnnTensorDescriptor_t probabilities,
                                                  const cudnnTensorDescriptor_t gradients, const int *labels, const int *label_lengths,
                                                  const int *lengths, cudnnCTCLossAlgo_t algo, cudnnCTCLossDescriptor_t it, size_t *out) {
    *out = 0, null_ctc = 1;
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnGetCTCLossWorkspaceSize_v8(cudnnHandle_t h, cudnnCTCLossAlgo_t algo, cudnnCTCLossDescriptor_t it,
                                                     const cudnnTensorDescriptor_t probabilities,
                                                     const cudnnTensorDescriptor_t gradients, size_t *out) {
    *out = 0, null_ctc = 1;
    return CUDNN_STATUS_SUCCESS;
}

/* What else runs on a handle returns at once (stubs.c). The sizes that batch norm asks for are cuDNN's own answers for a handle
   that knows no device. */
