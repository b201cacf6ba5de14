/* GPM: the activity of MIG instances between two samples. */
#include "calls.h"

#include <stdlib.h>

#define HOPPER 9u
enum { GRAPHICS_UTIL = 1, SM_UTIL = 2 };

struct nvmlGpmSample_st {
    uint64_t at, active; /* nanoseconds */
};

static int supported(const struct GpuRecord *record) {
    return record->identity.architecture >= HOPPER && !(record->faults & FAULT_NO_GPM);
}

NVML_API nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (support == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (support->version != NVML_GPM_SUPPORT_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    support->isSupportedDevice = (unsigned int)supported(record);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (sample == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *sample = calloc(1, sizeof **sample);
    return *sample == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
    if (sample == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    free(sample);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int instance,
                                          nvmlGpmSample_t sample) {
    struct GpuRecord *record;
    struct InstanceEntry entry;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (sample == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (!supported(record)) return NVML_ERROR_NOT_SUPPORTED;
    result = state_instance(record, instance, &entry, &sample->at);
    if (result == NVML_SUCCESS) sample->active = entry.active;
    return result;
}

NVML_API nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *asked) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (asked == NULL || asked->sample1 == NULL || asked->sample2 == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (asked->version != NVML_GPM_METRICS_GET_VERSION) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (asked->sample2->at <= asked->sample1->at) return NVML_ERROR_INVALID_ARGUMENT;
    double duration = (double)(asked->sample2->at - asked->sample1->at);
    for (unsigned int place = 0; place < asked->numMetrics; place++) {
        nvmlGpmMetric_t *metric = &asked->metrics[place];
        metric->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        if (metric->metricId != SM_UTIL && metric->metricId != GRAPHICS_UTIL) continue;
        metric->nvmlReturn = NVML_SUCCESS;
        metric->value = 100.0 * ((double)asked->sample2->active - (double)asked->sample1->active)
                        / duration;
    }
    return NVML_SUCCESS;
}
