/* The management library: how many devices there are, their names and memory. Whatever else is called is not supported.
   With NULL_MANAGEMENT=0 it does not start, as on a machine without it. */
#include <string.h>
#include <unistd.h>

#include "device.h"

#define EXPORT __attribute__((visibility("default")))
#define UNSUPPORTED 3        /* NVML_ERROR_NOT_SUPPORTED */
#define NO_DRIVER 9           /* NVML_ERROR_DRIVER_NOT_LOADED */
#define INSUFFICIENT_SIZE 7  /* NVML_ERROR_INSUFFICIENT_SIZE */

extern size_t null_used(int);
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;

static int index_of(void *handle) { return (int)(size_t)handle - 1; }
static int handle_of(unsigned index, void **out) { *out = (void *)(size_t)(index + 1); return 0; }

static int start(void) { return number_from("NULL_MANAGEMENT", 1) ? 0 : NO_DRIVER; }
EXPORT int nvmlInit(void) { return start(); }
EXPORT int nvmlInit_v2(void) { return start(); }
EXPORT int nvmlInitWithFlags(unsigned flags) { return start(); }
EXPORT int nvmlShutdown(void) { return 0; }
EXPORT const char *nvmlErrorString(int error) { return error ? "not supported by the null driver" : "no error"; }
EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned bytes) { snprintf(out, bytes, "null"); return 0; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *out) { *out = device.count; return 0; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { return handle_of(index, out); }
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) { return handle_of(0, out); }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) {
    unsigned domain = 0, bus = 0;
    return handle_of(sscanf(id, "%x:%x", &domain, &bus) == 2 ? bus : 0, out);
}
EXPORT int nvmlDeviceGetName(void *h, char *out, unsigned bytes) { snprintf(out, bytes, "%s", device.name); return 0; }
EXPORT int nvmlDeviceGetUUID(void *h, char *out, unsigned bytes) {
    snprintf(out, bytes, "GPU-00000000-0000-0000-0000-%012d", index_of(h));
    return 0;
}
static unsigned long long free_of(void *h) {
    size_t used = null_used(index_of(h));
    return used < device.total ? device.total - used : 0;
}
EXPORT int nvmlDeviceGetMemoryInfo(void *h, memory_t *out) {
    out->total = device.total, out->free = free_of(h), out->used = out->total - out->free;
    return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *h, memory_v2_t *out) {
    out->total = device.total, out->reserved = 0, out->free = free_of(h), out->used = out->total - out->free;
    return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, process_t *out) {
    if (*count < 1 || !out) { *count = 1; return INSUFFICIENT_SIZE; }
    memset(out, 0, sizeof *out);
    *count = 1, out->pid = getpid(), out->used = null_used(index_of(h));
    return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *count, process_t *out) {
    return nvmlDeviceGetComputeRunningProcesses_v3(h, count, out);
}
EXPORT int nvmlDeviceGetUtilizationRates(void *h, unsigned out[2]) { out[0] = out[1] = 0; return 0; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *out) { return UNSUPPORTED; }
EXPORT int nvmlDeviceGetGpuFabricInfoV(void) { return UNSUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return UNSUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return UNSUPPORTED; }
