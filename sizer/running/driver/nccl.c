/* NCCL's public interface for one rank of a world without the other ranks. Collectives return at once. Small results are copied as if
   every rank had the data of this rank, so that sizes and flags which ranks exchange stay valid. PyTorch's own ProcessGroupNCCL runs
   over it, with its streams, events and buffers.

   Known limitation: the memory that NCCL itself takes from a device is not counted here. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <nccl.h>

#include "device.h"

#define EXPORT __attribute__((visibility("default")))

struct ncclComm { int ranks, rank, device; char opaque[4096]; };
extern cudaError_t cudaMalloc(void **, size_t), cudaFree(void *), cudaGetDevice(int *);

static size_t bytes_of(size_t count, ncclDataType_t type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* in the order of ncclDataType_t */
    return (unsigned)type < sizeof sizes / sizeof *sizes ? count * sizes[type] : count;
}
static void copy(void *to, const void *from, size_t bytes) {
    static size_t limit;
    if (!limit) limit = number_from("NULL_COPIED_BYTES", (size_t)64 << 20);
    if (to && from && to != from && bytes <= limit) memmove(to, from, bytes);
}
static ncclResult_t create(ncclComm_t *out, int ranks, int rank) {
    *out = calloc(1, sizeof **out);
    (*out)->ranks = ranks, (*out)->rank = rank;
    cudaGetDevice(&(*out)->device);
    return ncclSuccess;
}

EXPORT ncclResult_t ncclGetVersion(int *out) { *out = NCCL_VERSION_CODE; return ncclSuccess; }
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *out) { memset(out, 7, sizeof *out); return ncclSuccess; }
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) { return create(out, ranks, rank); }
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *c) {
    return create(out, ranks, rank);
}
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int ranks, int rank, int n, ncclUniqueId *ids, ncclConfig_t *c) {
    return create(out, ranks, rank);
}
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *out, int ranks, const int *devices) {
    for (int i = 0; i < ranks; i++) create(out + i, ranks, i), out[i]->device = devices ? devices[i] : i;
    return ncclSuccess;
}

/* Only the other ranks know how many of them give the same color: sizer/running/other_ranks.py says so before the call. */
static int split_ranks, split_rank;
EXPORT void null_next_split(int ranks, int rank) { split_ranks = ranks, split_rank = rank; }
EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *c) {
    if (color == NCCL_SPLIT_NOCOLOR) { *out = NULL; return ncclSuccess; }
    return split_ranks ? create(out, split_ranks, split_rank) : create(out, comm->ranks, key);
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *out) { *out = comm->ranks; return ncclSuccess; }
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *out) { *out = comm->rank; return ncclSuccess; }
EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *out) { *out = comm->device; return ncclSuccess; }
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out) { *out = ncclSuccess; return ncclSuccess; }
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void *at, size_t bytes, void **out) { *out = at; return ncclSuccess; }
EXPORT const char *ncclGetErrorString(ncclResult_t error) { return error ? "an error of the null driver" : "no error"; }
EXPORT const char *ncclGetLastError(ncclComm_t comm) { return "no error"; }
EXPORT ncclResult_t ncclMemAlloc(void **at, size_t bytes) { return cudaMalloc(at, bytes) ? ncclUnhandledCudaError : ncclSuccess; }
EXPORT ncclResult_t ncclMemFree(void *at) { return cudaFree(at) ? ncclUnhandledCudaError : ncclSuccess; }

EXPORT ncclResult_t ncclAllReduce(const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t s) {
    copy(to, from, bytes_of(n, type));
    return ncclSuccess;
}
EXPORT ncclResult_t ncclReduce(const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                               cudaStream_t s) {
    if (comm->rank == root) copy(to, from, bytes_of(n, type));
    return ncclSuccess;
}
EXPORT ncclResult_t ncclBroadcast(const void *from, void *to, size_t n, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t s) {
    if (comm->rank == root) copy(to, from, bytes_of(n, type));
    return ncclSuccess;
}
static void gather(const void *from, char *to, size_t bytes, ncclComm_t comm) {
    char *own = to + comm->rank * bytes;
    copy(own, from, bytes);
    for (int i = 0; i < comm->ranks; i++) copy(to + i * bytes, own, bytes);
}
EXPORT ncclResult_t ncclAllGather(const void *from, void *to, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t s) {
    gather(from, to, bytes_of(n, type), comm);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclGather(const void *from, void *to, size_t n, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t s) {
    if (comm->rank == root) gather(from, to, bytes_of(n, type), comm);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclReduceScatter(const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t s) {
    size_t bytes = bytes_of(n, type);
    copy(to, (const char *)from + comm->rank * bytes, bytes);
    return ncclSuccess;
}
EXPORT ncclResult_t ncclAlltoAll(const void *from, void *to, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t s) {
    copy(to, from, comm->ranks * bytes_of(n, type));
    return ncclSuccess;
}
