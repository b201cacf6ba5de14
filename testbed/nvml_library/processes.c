/* Which processes use a GPU, and how much. */
#include "calls.h"

enum { COMPUTE, GRAPHICS, MPS };

static nvmlReturn_t list(nvmlDevice_t device, uint32_t kind, unsigned int *count,
                         nvmlProcessInfo_t *infos) {
    struct GpuRecord *record;
    struct Live live;
    unsigned int found = 0, room;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (record->faults & FAULT_NO_PROCESSES) return NVML_ERROR_NOT_SUPPORTED;
    result = state_read(record, &live, NULL);
    if (result != NVML_SUCCESS) return result;
    room = infos == NULL ? 0 : *count;
    for (uint32_t place = 0; place < live.processes; place++) {
        const struct ProcessEntry *entry = &live.process[place];
        if (entry->kind != kind) continue;
        if (device->instance != 0 && device->instance != entry->instance) continue;
        if (found < room)
            infos[found] = (nvmlProcessInfo_t){entry->pid, entry->memory, entry->instance,
                                               entry->instance == NO_INSTANCE ? NO_INSTANCE : 0};
        found++;
    }
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define PROCESS_LIST(NAME, KIND)                                                               \
    NVML_API nvmlReturn_t NAME(nvmlDevice_t device, unsigned int *count,                       \
                               nvmlProcessInfo_t *infos) {                                     \
        return list(device, KIND, count, infos);                                               \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS)

NVML_API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                                      nvmlProcessUtilizationSample_t *samples,
                                                      unsigned int *count,
                                                      unsigned long long last_seen) {
    struct GpuRecord *record;
    struct Live live;
    unsigned int found = 0, room;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (record->mig || record->faults & FAULT_NO_PROCESSES) return NVML_ERROR_NOT_SUPPORTED;
    result = state_read(record, &live, NULL);
    if (result != NVML_SUCCESS) return result;
    room = samples == NULL ? 0 : *count;
    for (uint32_t place = 0; place < live.samples; place++) {
        const struct SampleEntry *sample = &live.sample[place];
        if (sample->stamp <= last_seen) continue;
        if (found < room)
            samples[found] = (nvmlProcessUtilizationSample_t){
                sample->pid, sample->stamp, sample->sm, sample->memory, 0, 0};
        found++;
    }
    if (found == 0) return NVML_ERROR_NOT_FOUND;
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
