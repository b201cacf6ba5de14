/* Events, of which there are Xids only. */
#include "calls.h"

#include <stdlib.h>

#define XID 0x8ull
#define POLL_MS 5u

struct nvmlEventSet_st {
    int watched[MAX_GPUS];
    uint32_t seen[MAX_GPUS];
};

NVML_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (set == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    return *set == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (set == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    free(set);
    return NVML_SUCCESS;
}

RECORD_VALUE(nvmlDeviceGetSupportedEventTypes, unsigned long long, XID)

NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                               nvmlEventSet_t set) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (types & ~XID) return NVML_ERROR_NOT_SUPPORTED;
    if (set == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (types) {
        set->watched[device->index] = 1;
        set->seen[device->index] = record->xid_serial;
    }
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data,
                                          unsigned int milliseconds) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (set == NULL || data == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    for (;;) {
        for (unsigned int index = 0; index < MAX_GPUS; index++) {
            const struct GpuRecord *record = &state_host()->gpu[index];
            uint32_t serial = __atomic_load_n(&record->xid_serial, __ATOMIC_ACQUIRE);
            if (!set->watched[index] || serial == set->seen[index]) continue;
            set->seen[index]++;
            *data = (nvmlEventData_t){state_handle(index, 0), XID, record->xid, NO_INSTANCE,
                                      NO_INSTANCE};
            return NVML_SUCCESS;
        }
        if (milliseconds == 0) return NVML_ERROR_TIMEOUT;
        unsigned int pause = milliseconds < POLL_MS ? milliseconds : POLL_MS;
        state_pause_ms(pause);
        milliseconds -= pause;
    }
}

NVML_API nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data,
                                       unsigned int milliseconds) {
    return nvmlEventSetWait_v2(set, data, milliseconds);
}
