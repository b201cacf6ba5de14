/* Power, energy, clocks, load and temperature. */
#include "calls.h"

enum { VALUE_UINT = 1, VALUE_ULONGLONG = 3 };
enum { CLOCK_GRAPHICS, CLOCK_SM, CLOCK_MEM, CLOCK_VIDEO };

/* Millijoules, as of the counter's latest edge. */
static nvmlReturn_t energy(struct GpuRecord *record, unsigned long long *millijoules) {
    struct Live live;
    uint64_t now;
    const struct Identity *identity = &record->identity;
    if (identity->counter_step == 0 || record->faults & FAULT_NO_COUNTER)
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t result = state_read(record, &live, &now);
    if (result != NVML_SUCCESS) return result;
    *millijoules = state_energy(identity, &live, now) / 1000u;
    return NVML_SUCCESS;
}

static nvmlReturn_t power(struct GpuRecord *record, int average, unsigned int *milliwatts) {
    struct Live live;
    if (record->faults & FAULT_NO_POWER || (average && !record->identity.has_average))
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t result = state_read(record, &live, NULL);
    if (result == NVML_SUCCESS) *milliwatts = average ? live.power_average : live.power_instant;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device,
                                                          unsigned long long *millijoules) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    return millijoules == NULL ? NVML_ERROR_INVALID_ARGUMENT : energy(record, millijoules);
}

NVML_API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (milliwatts == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    return power(record, record->identity.usage_is_average != 0, milliwatts);
}

static nvmlReturn_t field(struct GpuRecord *record, nvmlFieldValue_t *entry) {
    struct Live live;
    const struct Identity *identity = &record->identity;
    if (entry->scopeId != 0) return NVML_ERROR_NOT_SUPPORTED; /* module and memory power */
    nvmlReturn_t result = state_read(record, &live, NULL);
    if (result != NVML_SUCCESS) return result;
    entry->value.ullVal = 0;
    entry->valueType = VALUE_ULONGLONG;
    switch (entry->fieldId) {
    case 74: entry->value.ullVal = live.capped_ns; return NVML_SUCCESS;
    case 269: entry->value.ullVal = live.sw_thermal_ns; return NVML_SUCCESS;
    case 270: entry->value.ullVal = live.hw_thermal_ns; return NVML_SUCCESS;
    case 271: entry->value.ullVal = live.power_brake_ns; return NVML_SUCCESS;
    case 83:
    case 191: return energy(record, &entry->value.ullVal);
    default: break;
    }
    entry->valueType = VALUE_UINT;
    switch (entry->fieldId) {
    case 185: return power(record, 1, &entry->value.uiVal);
    case 186: return power(record, 0, &entry->value.uiVal);
    case 187: entry->value.uiVal = identity->limit_min; return NVML_SUCCESS;
    case 188: entry->value.uiVal = identity->limit_max; return NVML_SUCCESS;
    case 189: entry->value.uiVal = identity->limit_default; return NVML_SUCCESS;
    case 190: entry->value.uiVal = live.enforced; return NVML_SUCCESS;
    case 192: entry->value.uiVal = (unsigned int)record->limit_request; return NVML_SUCCESS;
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

/* Succeeds as a whole; each entry carries its own code. */
NVML_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count,
                                               nvmlFieldValue_t *values) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (count <= 0 || values == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    for (int place = 0; place < count; place++) {
        values[place].timestamp = (int64_t)state_unix_us();
        values[place].latencyUsec = 0;
        values[place].nvmlReturn = device->instance != 0 ? NVML_ERROR_NOT_SUPPORTED
                                                         : field(record, &values[place]);
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t clock_of(struct GpuRecord *record, unsigned int kind, int current,
                             unsigned int *mhz) {
    struct Live live;
    nvmlReturn_t result = state_read(record, &live, NULL);
    if (result != NVML_SUCCESS) return result;
    if (mhz == NULL || kind > CLOCK_VIDEO) return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int graphics = current ? live.clock : record->identity.clock_max;
    if (kind == CLOCK_MEM)
        *mhz = record->identity.memory_clock;
    else
        *mhz = kind == CLOCK_VIDEO ? graphics * 85 / 100 : graphics;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int kind,
                                             unsigned int *mhz) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    return result != NVML_SUCCESS ? result : clock_of(record, kind, 1, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned int kind,
                                                unsigned int *mhz) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    return result != NVML_SUCCESS ? result : clock_of(record, kind, 0, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned int kind, unsigned int which,
                                         unsigned int *mhz) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    return result != NVML_SUCCESS ? result : clock_of(record, kind, which == 0, mhz);
}

static nvmlReturn_t size_up(unsigned int *count, unsigned int needed, const unsigned int *rows) {
    if (count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    int enough = rows != NULL && *count >= needed;
    *count = needed;
    return enough ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned int *count,
                                                         unsigned int *clocks) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    result = size_up(count, 1, clocks);
    if (result == NVML_SUCCESS) clocks[0] = record->identity.memory_clock;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memory,
                                                           unsigned int *count,
                                                           unsigned int *clocks) {
    struct GpuRecord *record;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    const struct Identity *identity = &record->identity;
    if (memory != identity->memory_clock) return NVML_ERROR_INVALID_ARGUMENT;
    unsigned int steps = (identity->clock_max - identity->clock_min) / identity->clock_step;
    result = size_up(count, steps + 1, clocks);
    if (result != NVML_SUCCESS) return result;
    for (unsigned int place = 0; place <= steps; place++) /* highest first */
        clocks[place] = identity->clock_min + (steps - place) * identity->clock_step;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    struct GpuRecord *record;
    struct Live live;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (record->mig) return NVML_ERROR_NOT_SUPPORTED;
    if (rates == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    result = state_read(record, &live, NULL);
    if (result != NVML_SUCCESS) return result;
    rates->gpu = live.utilisation;
    rates->memory = live.memory_utilisation;
    return NVML_SUCCESS;
}

LIVE_VALUE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, live.reasons)
LIVE_VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, live.reasons)
RECORD_VALUE(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, 0xFF)
RECORD_VALUE(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, 0xFF)
RECORD_VALUE(nvmlDeviceGetPerformanceState, unsigned int, 0)
RECORD_VALUE(nvmlDeviceGetPowerState, unsigned int, 0)

NVML_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor,
                                               unsigned int *celsius) {
    struct GpuRecord *record;
    struct Live live;
    nvmlReturn_t result = state_whole(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (sensor != 0 || celsius == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    result = state_read(record, &live, NULL);
    if (result == NVML_SUCCESS) *celsius = live.temperature;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *asked) {
    struct GpuRecord *record;
    unsigned int celsius = 0;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (asked == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (asked->version != NVML_TEMPERATURE_V1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    result = nvmlDeviceGetTemperature(device, asked->sensorType, &celsius);
    if (result == NVML_SUCCESS) asked->temperature = (int)celsius;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    struct GpuRecord *record;
    struct Live live;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (memory == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    result = state_read(record, &live, NULL);
    if (result != NVML_SUCCESS) return result;
    memory->total = record->identity.memory_total;
    memory->used = live.memory_used;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    struct GpuRecord *record;
    struct Live live;
    nvmlReturn_t result = state_device(device, &record);
    if (result != NVML_SUCCESS) return result;
    if (memory == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != NVML_MEMORY_V2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    result = state_read(record, &live, NULL);
    if (result != NVML_SUCCESS) return result;
    memory->total = record->identity.memory_total;
    memory->reserved = record->identity.memory_reserved;
    memory->used = live.memory_used - memory->reserved;
    memory->free = memory->total - live.memory_used;
    return NVML_SUCCESS;
}
