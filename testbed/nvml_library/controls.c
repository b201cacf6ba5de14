/* Limits, locked clocks, persistence. A request is one aligned store that the owner notices. */
#include "calls.h"

#define VOLTA 5u
#define LARGEST_CLOCK 0xFFFFFFu

RECORD_VALUE(nvmlDeviceGetPowerManagementLimit, unsigned int, record->limit_request)
RECORD_VALUE(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, record->identity.limit_default)
RECORD_VALUE(nvmlDeviceGetPowerManagementMode, unsigned int, 1)
RECORD_VALUE(nvmlDeviceGetPersistenceMode, unsigned int, record->persistence_request)
LIVE_VALUE(nvmlDeviceGetEnforcedPowerLimit, unsigned int, live.enforced)

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device,
                                                                   unsigned int *lowest,
                                                                   unsigned int *highest) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (lowest == NULL || highest == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *lowest = record->identity.limit_min;
    *highest = record->identity.limit_max;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device,
                                                        unsigned int milliwatts) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (state_forbids(record)) return NVML_ERROR_NO_PERMISSION;
    if (milliwatts < record->identity.limit_min || milliwatts > record->identity.limit_max)
        return NVML_ERROR_INVALID_ARGUMENT;
    state_request_limit(record, milliwatts);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device,
                                                           nvmlPowerValue_v2_t *value) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (value == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (value->version != NVML_POWER_VALUE_V2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (value->powerScope != 0) return NVML_ERROR_NOT_SUPPORTED;
    return nvmlDeviceSetPowerManagementLimit(device, value->powerValueMw);
}

static nvmlReturn_t may_lock(nvmlDevice_t device, struct GpuRecord **record) {
    nvmlReturn_t result = state_whole(device, record);
    if (result != NVML_SUCCESS) return result;
    if ((*record)->identity.architecture < VOLTA) return NVML_ERROR_NOT_SUPPORTED;
    return state_forbids(*record) ? NVML_ERROR_NO_PERMISSION : NVML_SUCCESS;
}

static nvmlReturn_t lock_clocks(nvmlDevice_t device, unsigned int lowest, unsigned int highest,
                                size_t field) {
    struct GpuRecord *record;
    nvmlReturn_t result = may_lock(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (highest == 0 || highest > LARGEST_CLOCK || lowest > highest)
        return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t *request = (uint64_t *)(void *)((char *)record + field);
    __atomic_store_n(request, (uint64_t)lowest << 24 | highest, __ATOMIC_RELEASE);
    return NVML_SUCCESS;
}

static nvmlReturn_t reset_clocks(nvmlDevice_t device, size_t field) {
    struct GpuRecord *record;
    nvmlReturn_t result = may_lock(device, &record);
    if (result != NVML_SUCCESS) return result;
    __atomic_store_n((uint64_t *)(void *)((char *)record + field), 0, __ATOMIC_RELEASE);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned int lowest,
                                                   unsigned int highest) {
    return lock_clocks(device, lowest, highest, offsetof(struct GpuRecord, clock_request));
}

NVML_API nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device) {
    return reset_clocks(device, offsetof(struct GpuRecord, clock_request));
}

NVML_API nvmlReturn_t nvmlDeviceSetMemoryLockedClocks(nvmlDevice_t device, unsigned int lowest,
                                                      unsigned int highest) {
    return lock_clocks(device, lowest, highest, offsetof(struct GpuRecord, memory_clock_request));
}

NVML_API nvmlReturn_t nvmlDeviceResetMemoryLockedClocks(nvmlDevice_t device) {
    return reset_clocks(device, offsetof(struct GpuRecord, memory_clock_request));
}

NVML_API nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned int mode) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (state_forbids(record)) return NVML_ERROR_NO_PERMISSION;
    if (mode > 1) return NVML_ERROR_INVALID_ARGUMENT;
    __atomic_store_n(&record->persistence_request, mode, __ATOMIC_RELAXED);
    return NVML_SUCCESS;
}
