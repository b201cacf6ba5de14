/* How most calls look: check the device, then yield one value. */
#ifndef WATTSPAN_CALLS_H
#define WATTSPAN_CALLS_H

#include "state.h"

/* A call that yields one unsigned int from the record (no consistent copy needed). */
#define RECORD_VALUE(NAME, TYPE, EXPRESSION)                             \
    NVML_API nvmlReturn_t NAME(nvmlDevice_t device, TYPE *value) {       \
        struct GpuRecord *record;                                        \
        nvmlReturn_t result = state_whole(device, &record);              \
        if (result != NVML_SUCCESS) return result;                       \
        if (value == NULL) return NVML_ERROR_INVALID_ARGUMENT;           \
        *value = (TYPE)(EXPRESSION);                                     \
        return NVML_SUCCESS;                                             \
    }

/* A call that yields one value from a consistent copy. */
#define LIVE_VALUE(NAME, TYPE, EXPRESSION)                               \
    NVML_API nvmlReturn_t NAME(nvmlDevice_t device, TYPE *value) {       \
        struct GpuRecord *record;                                        \
        struct Live live;                                                \
        nvmlReturn_t result = state_whole(device, &record);              \
        if (result != NVML_SUCCESS) return result;                       \
        if (value == NULL) return NVML_ERROR_INVALID_ARGUMENT;           \
        result = state_read(record, &live, NULL);                        \
        if (result == NVML_SUCCESS) *value = (TYPE)(EXPRESSION);         \
        return result;                                                   \
    }

#endif
