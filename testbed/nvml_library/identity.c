/* Which GPUs there are and what they are. */
#define _GNU_SOURCE
#include "calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

NVML_API const char *nvmlErrorString(nvmlReturn_t result) {
    switch ((int)result) {
#include "messages.inc"
    default: return "Unknown Error";
    }
}

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    nvmlReturn_t result = state_ready();
    return result != NVML_SUCCESS
               ? result
               : state_text(state_host()->header.driver_version, version, length);
}

NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    nvmlReturn_t result = state_ready();
    return result != NVML_SUCCESS
               ? result
               : state_text(state_host()->header.nvml_version, version, length);
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (version == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *version = (int)state_host()->header.cuda_version;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

NVML_API nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
    char path[64];
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (name == NULL || length == 0) return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (file == NULL) return NVML_ERROR_NOT_FOUND;
    size_t count = fread(name, 1, length - 1, file);
    fclose(file);
    name[count] = '\0'; /* the arguments follow the first terminator */
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *count = state_host()->header.gpus;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) {
    return nvmlDeviceGetCount_v2(count);
}

static nvmlReturn_t hand_out(unsigned int index, nvmlDevice_t *device) {
    struct GpuRecord *record;
    if (device == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    /* a lost GPU has no handle */
    nvmlReturn_t result = state_device(state_handle(index, 0), &record);
    if (result == NVML_SUCCESS) *device = state_handle(index, 0);
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (index >= state_host()->header.gpus) return NVML_ERROR_INVALID_ARGUMENT;
    return hand_out(index, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlReturn_t find(size_t field, const char *wanted, nvmlDevice_t *device) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (wanted == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int index = 0; index < state_host()->header.gpus; index++) {
        const char *text = (const char *)&state_host()->gpu[index].identity + field;
        if (strcasecmp(text, wanted) == 0) return hand_out(index, device);
    }
    return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    return find(offsetof(struct Identity, uuid), uuid, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    return find(offsetof(struct Identity, serial), serial, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
    char full[64], *rest;
    if (bus == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    unsigned long domain = strtoul(bus, &rest, 16);
    if (rest == bus || *rest != ':') return NVML_ERROR_INVALID_ARGUMENT;
    /* 0000:17:00.0 and 00000000:17:00.0 name the same slot */
    snprintf(full, sizeof full, "%08lX%s", domain, rest);
    return find(offsetof(struct Identity, bus_id), full, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus, nvmlDevice_t *device) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    struct GpuRecord *record;
    struct InstanceEntry entry;
    char text[128];
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (device->instance == 0) return state_text(record->identity.name, name, length);
    result = state_instance(record, device->instance, &entry, NULL);
    if (result != NVML_SUCCESS) return result;
    snprintf(text, sizeof text, "%.95s MIG %ug.%ugb", record->identity.name, entry.slices,
             (unsigned int)(entry.memory >> 30));
    return state_text(text, name, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    struct GpuRecord *record;
    char text[96];
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (device->instance == 0) return state_text(record->identity.uuid, uuid, length);
    int kept = (int)strlen(record->identity.uuid) - 6; /* without "GPU-" and two digits */
    snprintf(text, sizeof text, "MIG-%.*s%02x", kept, record->identity.uuid + 4, device->instance);
    return state_text(text, uuid, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    return result != NVML_SUCCESS ? result : state_text(record->identity.serial, serial, length);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (pci == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    const struct Identity *identity = &record->identity;
    memset(pci, 0, sizeof *pci);
    memcpy(pci->busIdLegacy, identity->bus_id_legacy, sizeof pci->busIdLegacy);
    memcpy(pci->busId, identity->bus_id, sizeof pci->busId);
    pci->domain = identity->domain;
    pci->bus = identity->bus;
    pci->device = identity->device;
    pci->pciDeviceId = identity->pci_device;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    return nvmlDeviceGetPciInfo_v3(device, pci);
}

RECORD_VALUE(nvmlDeviceGetIndex, unsigned int, device->index)
RECORD_VALUE(nvmlDeviceGetMinorNumber, unsigned int, device->index)
RECORD_VALUE(nvmlDeviceGetComputeMode, unsigned int, 0)

NVML_API nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *value) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (value == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *value = record->identity.architecture;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, unsigned int *value) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (value == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *value = record->identity.brand;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major,
                                                         int *minor) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (major == NULL || minor == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *major = (int)record->identity.compute_major;
    *minor = (int)record->identity.compute_minor;
    return NVML_SUCCESS;
}

/* MIG: GPU instances, each with one compute instance of the same size. */

static int divisible(const struct GpuRecord *record) { /* of the Ampere chips only A100 and A30 */
    return record->identity.compute_major >= 8 && record->identity.compute_minor == 0;
}

NVML_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                           unsigned int *pending) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (current == NULL || pending == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (!divisible(record)) return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = record->mig != 0;
    return NVML_SUCCESS;
}

RECORD_VALUE(nvmlDeviceGetMaxMigDeviceCount, unsigned int, divisible(record) ? MAX_INSTANCES : 0)

NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
                                                          nvmlDevice_t *mig) {
    struct GpuRecord *record;
    struct Live live;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (!record->mig) return NVML_ERROR_NOT_FOUND;
    result = state_read(record, &live, NULL);
    if (result != NVML_SUCCESS) return result;
    if (index >= live.instances) return NVML_ERROR_NOT_FOUND;
    *mig = state_handle(device->index, live.instance[index].id);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    *is_mig = device->instance != 0;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig,
                                                                   nvmlDevice_t *device) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_device(mig, &record);
    if (result != NVML_SUCCESS) return result;
    if (mig->instance == 0) return NVML_ERROR_INVALID_ARGUMENT;
    *device = state_handle(mig->index, 0);
    return NVML_SUCCESS;
}

static nvmlReturn_t instance_of(nvmlDevice_t device, struct GpuRecord **record) {
    nvmlReturn_t result = state_device(device, record);
    if (result == NVML_SUCCESS && device->instance == 0) return NVML_ERROR_NOT_SUPPORTED;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) {
    struct GpuRecord *record;
    nvmlReturn_t result = instance_of(device, &record);
    if (result == NVML_SUCCESS) *id = device->instance;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) {
    struct GpuRecord *record;
    nvmlReturn_t result = instance_of(device, &record);
    if (result == NVML_SUCCESS) *id = 0;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device,
                                                 nvmlDeviceAttributes_t *attributes) {
    struct GpuRecord *record;
    struct InstanceEntry entry;
    nvmlReturn_t result = instance_of(device, &record);
    if (result == NVML_SUCCESS) result = state_instance(record, device->instance, &entry, NULL);
    if (result != NVML_SUCCESS) return result;
    memset(attributes, 0, sizeof *attributes);
    attributes->multiprocessorCount = entry.multiprocessors;
    attributes->gpuInstanceSliceCount = attributes->computeInstanceSliceCount = entry.slices;
    attributes->memorySizeMB = entry.memory / (1u << 20);
    return NVML_SUCCESS;
}
