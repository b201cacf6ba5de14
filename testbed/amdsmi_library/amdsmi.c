/* AMD SMI over the file of emulated GPUs. state.c, which NVML's library shares, reads that file. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "amdsmi_abi.h"
#include "state.h"

#define MAX_PARTITIONS 8u
#define NOT_APPLICABLE 0xFFFFu
#define NONE 0xFFFFFFFFu
#define MICROWATTS 1000u /* in a milliwatt */

nvmlReturn_t nvmlInitWithFlags(unsigned int flags);
nvmlReturn_t nvmlShutdown(void);

struct processor {
    unsigned int gpu, partition, found; /* found: by the present initialisation */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct processor processors[MAX_GPUS][MAX_PARTITIONS];
static unsigned int found[MAX_GPUS], sockets; /* GPUs, by socket */

/* The code of a call on the whole host: state.c has NVML's. */
static amdsmi_status_t of_host(nvmlReturn_t result) {
    switch (result) {
    case NVML_SUCCESS: return AMDSMI_STATUS_SUCCESS;
    case NVML_ERROR_UNINITIALIZED: return AMDSMI_STATUS_NOT_INIT;
    case NVML_ERROR_DRIVER_NOT_LOADED: return AMDSMI_STATUS_DRIVER_NOT_LOADED;
    case NVML_ERROR_UNKNOWN: return AMDSMI_STATUS_INTERNAL_EXCEPTION;
    default: return (amdsmi_status_t)result; /* that of a fault */
    }
}

static unsigned int partitions(const struct GpuRecord *record) {
    return record->partitions == 0 ? 1 : record->partitions;
}

AMDSMI_API amdsmi_status_t amdsmi_init(uint64_t flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    amdsmi_status_t result = of_host(nvmlInitWithFlags(0));
    if (result == AMDSMI_STATUS_SUCCESS) {
        struct HostRecord *host = state_host();
        memset(processors, 0, sizeof processors);
        sockets = 0;
        for (unsigned int gpu = 0; gpu < host->header.gpus; gpu++) {
            if (host->gpu[gpu].error != 0) continue; /* it is not there */
            found[sockets++] = gpu;
            for (unsigned int each = 0; each < partitions(&host->gpu[gpu]); each++)
                processors[gpu][each] = (struct processor){gpu, each, 1};
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

AMDSMI_API amdsmi_status_t amdsmi_shut_down(void) { return of_host(nvmlShutdown()); }

static amdsmi_status_t is_processor(amdsmi_processor_handle handle) {
    const char *address = (const char *)handle, *first = (const char *)processors;
    if (address < first || address >= first + sizeof processors) return AMDSMI_STATUS_INVAL;
    if ((size_t)(address - first) % sizeof(struct processor) != 0) return AMDSMI_STATUS_INVAL;
    return handle->found ? AMDSMI_STATUS_SUCCESS : AMDSMI_STATUS_INVAL;
}

/* The record of a processor whose GPU answers. */
static amdsmi_status_t answering(amdsmi_processor_handle handle, struct GpuRecord **record) {
    amdsmi_status_t result = of_host(state_ready());
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    result = is_processor(handle);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    *record = &state_host()->gpu[handle->gpu];
    while (__atomic_load_n(&(*record)->faults, __ATOMIC_RELAXED) & FAULT_HANG) state_pause_ms(5);
    result = (amdsmi_status_t)__atomic_load_n(&(*record)->error, __ATOMIC_RELAXED);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    return handle->partition < partitions(*record) ? AMDSMI_STATUS_SUCCESS
                                                   : AMDSMI_STATUS_NOT_FOUND;
}

/* The same, for calls that the first partition alone answers, for the whole board. */
static amdsmi_status_t whole(amdsmi_processor_handle handle, struct GpuRecord **record) {
    amdsmi_status_t result = answering(handle, record);
    if (result == AMDSMI_STATUS_SUCCESS && handle->partition != 0)
        return AMDSMI_STATUS_NOT_SUPPORTED;
    return result;
}

/* The same as `how`, with a consistent copy. */
static amdsmi_status_t copied(amdsmi_processor_handle handle, struct GpuRecord **record,
                              struct Live *live, uint64_t *now,
                              amdsmi_status_t (*how)(amdsmi_processor_handle,
                                                     struct GpuRecord **)) {
    amdsmi_status_t result = how(handle, record);
    return result == AMDSMI_STATUS_SUCCESS ? of_host(state_read(*record, live, now)) : result;
}

/* --------------------------------------------------------------------------------- identity */

AMDSMI_API amdsmi_status_t amdsmi_get_socket_handles(uint32_t *count, amdsmi_socket_handle *into) {
    amdsmi_status_t result = of_host(state_ready());
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (count == NULL) return AMDSMI_STATUS_INVAL;
    for (unsigned int place = 0; into != NULL && place < sockets && place < *count; place++)
        into[place] = &processors[found[place]][0];
    *count = sockets;
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_processor_handles(amdsmi_socket_handle socket,
                                                        uint32_t *count,
                                                        amdsmi_processor_handle *into) {
    amdsmi_status_t result = of_host(state_ready());
    if (result == AMDSMI_STATUS_SUCCESS) result = is_processor(socket);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (count == NULL) return AMDSMI_STATUS_INVAL;
    uint32_t there = 0, room = *count;
    for (unsigned int each = 0; each < MAX_PARTITIONS; each++) {
        struct processor *processor = &processors[socket->gpu][each];
        if (!processor->found) continue;
        if (into != NULL && there < room) into[there] = processor;
        there++;
    }
    *count = there;
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_device_bdf(amdsmi_processor_handle handle,
                                                     uint64_t *bdf) {
    struct GpuRecord *record;
    amdsmi_status_t result = answering(handle, &record);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    const struct Identity *identity = &record->identity;
    *bdf = (uint64_t)identity->domain << 16 | (uint64_t)identity->bus << 8 |
           (uint64_t)identity->device << 3 | handle->partition;
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_device_uuid(amdsmi_processor_handle handle,
                                                      unsigned int *size, char *uuid) {
    struct GpuRecord *record;
    amdsmi_status_t result = answering(handle, &record);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (size == NULL || state_text(record->identity.uuid, uuid, *size) != NVML_SUCCESS)
        return AMDSMI_STATUS_INVAL;
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_asic_info(amdsmi_processor_handle handle,
                                                    amdsmi_asic_info_t *info) {
    struct GpuRecord *record;
    amdsmi_status_t result = answering(handle, &record);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    memset(info, 0, sizeof *info);
    strcpy(info->market_name, record->identity.name);
    strcpy(info->vendor_name, "Advanced Micro Devices Inc. [AMD/ATI]");
    info->vendor_id = record->identity.pci_device & 0xFFFF;
    info->device_id = record->identity.pci_device >> 16;
    info->oam_id = handle->gpu;
    info->num_of_compute_units = record->identity.multiprocessors / partitions(record);
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_driver_info(amdsmi_processor_handle handle,
                                                      amdsmi_driver_info_t *info) {
    struct GpuRecord *record;
    amdsmi_status_t result = answering(handle, &record);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    memset(info, 0, sizeof *info);
    strcpy(info->driver_name, "amdgpu");
    strcpy(info->driver_version, state_host()->header.driver_version);
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_compute_partition(amdsmi_processor_handle handle,
                                                            char *mode, uint32_t size) {
    struct GpuRecord *record;
    amdsmi_status_t result = answering(handle, &record);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    const char *names[MAX_PARTITIONS + 1] = {[1] = "SPX", [2] = "DPX", [4] = "QPX", [8] = "CPX"};
    return of_host(state_text(names[partitions(record)], mode, size));
}

/* --------------------------------------------------------------------------------- readings */

AMDSMI_API amdsmi_status_t amdsmi_get_energy_count(amdsmi_processor_handle handle, uint64_t *energy,
                                                   float *resolution, uint64_t *timestamp) {
    struct GpuRecord *record;
    struct Live live;
    uint64_t now;
    amdsmi_status_t result = copied(handle, &record, &live, &now, whole);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (record->faults & FAULT_NO_COUNTER) return AMDSMI_STATUS_NOT_SUPPORTED;
    uint64_t counter = state_energy(&record->identity, &live, now) * PICOJOULES / ENERGY_UNIT;
    *energy = record->faults & FAULT_SHORT_COUNTER ? counter & NONE : counter;
    *resolution = (float)ENERGY_UNIT / (float)PICOJOULES;
    *timestamp = now;
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_power_info(amdsmi_processor_handle handle,
                                                 amdsmi_power_info_t *info) {
    struct GpuRecord *record;
    struct Live live;
    amdsmi_status_t result = copied(handle, &record, &live, NULL, whole);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (record->faults & FAULT_NO_POWER) return AMDSMI_STATUS_NOT_SUPPORTED;
    memset(info, 0, sizeof *info);
    info->socket_power = info->current_socket_power = live.power_instant / 1000;
    info->average_socket_power = NOT_APPLICABLE; /* as on an MI300 */
    info->power_limit = (uint32_t)record->limit_request / 1000;
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_activity(amdsmi_processor_handle handle,
                                                   amdsmi_engine_usage_t *info) {
    struct GpuRecord *record;
    struct Live live;
    amdsmi_status_t result = copied(handle, &record, &live, NULL, answering);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    memset(info, 0, sizeof *info);
    info->gfx_activity = live.utilisation;
    info->umc_activity = live.memory_utilisation;
    info->mm_activity = NOT_APPLICABLE;
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_clock_info(amdsmi_processor_handle handle, uint32_t kind,
                                                 amdsmi_clk_info_t *info) {
    struct GpuRecord *record;
    struct Live live;
    amdsmi_status_t result = copied(handle, &record, &live, NULL, answering);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    const struct Identity *identity = &record->identity;
    memset(info, 0, sizeof *info);
    if (kind == CLOCK_MEM) {
        info->clk = info->min_clk = info->max_clk = identity->memory_clock;
        info->clk_locked = 0xFF;
    } else if (kind == CLOCK_GFX) {
        info->clk = live.clock;
        info->min_clk = identity->clock_min;
        info->max_clk = identity->clock_max;
        info->clk_locked = record->clock_request != 0;
    } else {
        return AMDSMI_STATUS_INVAL;
    }
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_temp_metric(amdsmi_processor_handle handle, uint32_t sensor,
                                                  uint32_t metric, int64_t *celsius) {
    struct GpuRecord *record;
    struct Live live;
    amdsmi_status_t result = copied(handle, &record, &live, NULL, answering);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (sensor != TEMPERATURE_HOTSPOT || metric != TEMPERATURE_CURRENT)
        return AMDSMI_STATUS_NOT_SUPPORTED;
    *celsius = live.temperature;
    return AMDSMI_STATUS_SUCCESS;
}

static amdsmi_status_t memory(amdsmi_processor_handle handle, uint32_t kind, int used,
                              uint64_t *bytes) {
    struct GpuRecord *record;
    struct Live live;
    amdsmi_status_t result = copied(handle, &record, &live, NULL, answering);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (kind != MEMORY_VRAM) return AMDSMI_STATUS_NOT_SUPPORTED;
    *bytes = used ? live.memory_used : record->identity.memory_total;
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_memory_total(amdsmi_processor_handle handle,
                                                       uint32_t kind, uint64_t *bytes) {
    return memory(handle, kind, 0, bytes);
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_memory_usage(amdsmi_processor_handle handle,
                                                       uint32_t kind, uint64_t *bytes) {
    return memory(handle, kind, 1, bytes);
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_process_list(amdsmi_processor_handle handle,
                                                       uint32_t *count, amdsmi_proc_info_t *list) {
    struct GpuRecord *record;
    struct Live live;
    amdsmi_status_t result = copied(handle, &record, &live, NULL, answering);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (record->faults & FAULT_NO_PROCESSES) return AMDSMI_STATUS_NOT_SUPPORTED;
    uint32_t room = *count, there = 0;
    for (unsigned int each = handle->partition; each < live.processes; each += partitions(record)) {
        const struct ProcessEntry *entry = &live.process[each];
        if (there++ >= room) continue;
        amdsmi_proc_info_t *info = &list[there - 1];
        int graphics = entry->kind == 1; /* the place in KINDS */
        memset(info, 0, sizeof *info);
        info->pid = entry->pid;
        info->mem = info->memory_usage.vram_mem = entry->memory;
        info->engine_usage.gfx = graphics ? entry->busy : 0;
        uint64_t units = (uint64_t)entry->share * record->identity.multiprocessors;
        info->cu_occupancy = graphics ? NONE : (uint32_t)((units + 500000u) / 1000000u);
    }
    *count = there;
    return AMDSMI_STATUS_SUCCESS;
}

/* --------------------------------------------------------------------------------- controls */

AMDSMI_API amdsmi_status_t amdsmi_get_power_cap_info(amdsmi_processor_handle handle,
                                                     uint32_t sensor,
                                                     amdsmi_power_cap_info_t *info) {
    struct GpuRecord *record;
    amdsmi_status_t result = whole(handle, &record);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (sensor != 0) return AMDSMI_STATUS_INVAL;
    const struct Identity *identity = &record->identity;
    memset(info, 0, sizeof *info);
    info->power_cap = (uint64_t)(uint32_t)record->limit_request * MICROWATTS;
    info->default_power_cap = (uint64_t)identity->limit_default * MICROWATTS;
    info->min_power_cap = (uint64_t)identity->limit_min * MICROWATTS;
    info->max_power_cap = (uint64_t)identity->limit_max * MICROWATTS;
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_set_power_cap(amdsmi_processor_handle handle, uint32_t sensor,
                                                uint64_t microwatts) {
    struct GpuRecord *record;
    amdsmi_status_t result = whole(handle, &record);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    if (sensor != 0) return AMDSMI_STATUS_INVAL;
    if (state_forbids(record)) return AMDSMI_STATUS_NO_PERM;
    uint64_t milliwatts = microwatts / 1000000u * 1000u; /* the driver keeps whole watts */
    if (milliwatts < record->identity.limit_min || milliwatts > record->identity.limit_max)
        return AMDSMI_STATUS_INPUT_OUT_OF_BOUNDS;
    state_request_limit(record, milliwatts);
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_get_gpu_perf_level(amdsmi_processor_handle handle,
                                                     uint32_t *level) {
    struct GpuRecord *record;
    amdsmi_status_t result = answering(handle, &record);
    if (result == AMDSMI_STATUS_SUCCESS)
        *level = record->clock_request != 0 ? LEVEL_DETERMINISM : LEVEL_AUTO;
    return result;
}

static amdsmi_status_t request_clock(struct GpuRecord *record, uint64_t request) {
    if (state_forbids(record)) return AMDSMI_STATUS_NO_PERM;
    __atomic_store_n(&record->clock_request, request, __ATOMIC_RELEASE);
    return AMDSMI_STATUS_SUCCESS;
}

AMDSMI_API amdsmi_status_t amdsmi_set_gpu_perf_level(amdsmi_processor_handle handle,
                                                     uint32_t level) {
    struct GpuRecord *record;
    amdsmi_status_t result = answering(handle, &record);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    return level == LEVEL_AUTO ? request_clock(record, 0) : AMDSMI_STATUS_NOT_SUPPORTED;
}

AMDSMI_API amdsmi_status_t amdsmi_set_gpu_perf_determinism_mode(amdsmi_processor_handle handle,
                                                                uint64_t megahertz) {
    struct GpuRecord *record;
    amdsmi_status_t result = answering(handle, &record);
    if (result != AMDSMI_STATUS_SUCCESS) return result;
    uint64_t lowest = record->identity.clock_min;
    if (megahertz < lowest || megahertz > record->identity.clock_max)
        return state_forbids(record) ? AMDSMI_STATUS_NO_PERM : AMDSMI_STATUS_INVAL;
    return request_clock(record, lowest << 24 | megahertz);
}
