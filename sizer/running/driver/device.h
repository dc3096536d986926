/* The described device. NULL_DEVICE holds a line of tab-separated fields: ten numbers separated by spaces, the name of the device and
   its description for cuDNN in JSON. NULL_DEVICES is the number of devices of this kind, 1 by default. */
#ifndef NULL_DEVICE_H
#define NULL_DEVICE_H
#include <stdio.h>
#include <stdlib.h>

#define MAX_DEVICES 16

static struct {
    int major, minor, compiled, processors, threads, blocks, shared_kib, reserved_kib, l2_kib, known, count;
    size_t total;
    char name[256], json[4096];
} device;

static size_t number_from(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

__attribute__((constructor(101))) static void read_device(void) {
    const char *text = getenv("NULL_DEVICE");
    device.known = text && sscanf(text, "%d %d %d %d %d %d %d %d %d %zu\t%255[^\t]\t%4095[^\n]", &device.major, &device.minor,
                                  &device.compiled, &device.processors, &device.threads, &device.blocks, &device.shared_kib,
                                  &device.reserved_kib, &device.l2_kib, &device.total, device.name, device.json) == 12;
    size_t count = number_from("NULL_DEVICES", 1);
    device.count = !device.known ? 0 : count > MAX_DEVICES ? MAX_DEVICES : (int)count;
}
#endif
