/* Initialisation, handles, and consistent reads. */
#define _GNU_SOURCE
#include "state.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define TRIES 4000 /* of half a millisecond: then the writer is taken for dead */
#define INSTANCES (MAX_PROCESSES + 1)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct HostRecord *host;
static int read_only; /* to who may only read the file, as the driver is to who is not root */
static unsigned int users;
static struct nvmlDevice_st handles[MAX_GPUS][INSTANCES];

static void pause_ns(long nanoseconds) {
    struct timespec time = {nanoseconds / 1000000000L, nanoseconds % 1000000000L};
    nanosleep(&time, NULL);
}

void state_pause_ms(unsigned int milliseconds) { pause_ns((long)milliseconds * 1000000L); }

struct HostRecord *state_host(void) { return host; }

uint64_t state_unix_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (uint64_t)time.tv_sec * 1000000u + (uint64_t)time.tv_nsec / 1000u;
}

static uint64_t monotonic_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static struct HostRecord *map_file(const char *path) {
    struct stat found;
    void *memory = MAP_FAILED;
    int file = open(path, O_RDWR | O_CLOEXEC);
    read_only = file < 0;
    if (read_only) file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return NULL;
    int access = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    if (fstat(file, &found) == 0 && found.st_size == (off_t)sizeof(struct HostRecord))
        memory = mmap(NULL, sizeof(struct HostRecord), access, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return NULL;
    struct HostRecord *mapped = memory;
    if (mapped->header.magic == MAGIC && mapped->header.version == VERSION) return mapped;
    munmap(memory, sizeof(struct HostRecord));
    return NULL;
}

int state_forbids(const struct GpuRecord *record) {
    return read_only || (record->faults & FAULT_NO_PERMISSION) != 0;
}

nvmlReturn_t state_ready(void) {
    struct HostRecord *mapped = host;
    if (mapped == NULL) return NVML_ERROR_UNINITIALIZED;
    while (__atomic_load_n(&mapped->header.hang, __ATOMIC_RELAXED)) state_pause_ms(5);
    return (nvmlReturn_t)__atomic_load_n(&mapped->header.error, __ATOMIC_RELAXED);
}

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    nvmlReturn_t result = NVML_SUCCESS;
    (void)flags;
    pthread_mutex_lock(&lock);
    if (host == NULL) {
        const char *path = getenv(ENVIRONMENT);
        host = path == NULL ? NULL : map_file(path);
        result = host == NULL ? NVML_ERROR_DRIVER_NOT_LOADED : state_ready();
        if (result != NVML_SUCCESS && host != NULL) {
            munmap(host, sizeof *host);
            host = NULL;
        }
    }
    if (result == NVML_SUCCESS) users++;
    pthread_mutex_unlock(&lock);
    return result;
}

NVML_API nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
NVML_API nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }

NVML_API nvmlReturn_t nvmlShutdown(void) {
    nvmlReturn_t result = NVML_SUCCESS;
    pthread_mutex_lock(&lock);
    if (users == 0)
        result = NVML_ERROR_UNINITIALIZED;
    else if (--users == 0)
        host = NULL; /* stays mapped: another thread may be inside a call */
    pthread_mutex_unlock(&lock);
    return result;
}

nvmlDevice_t state_handle(unsigned int index, unsigned int instance) {
    nvmlDevice_t handle = &handles[index][instance];
    handle->index = index;
    handle->instance = instance;
    return handle;
}

static int is_handle(nvmlDevice_t device) {
    const char *address = (const char *)device, *first = (const char *)handles;
    if (address < first || address >= first + sizeof handles) return 0;
    return (size_t)(address - first) % sizeof(struct nvmlDevice_st) == 0;
}

nvmlReturn_t state_device(nvmlDevice_t device, struct GpuRecord **record) {
    nvmlReturn_t result = state_ready();
    if (result != NVML_SUCCESS) return result;
    if (!is_handle(device) || device->index >= host->header.gpus)
        return NVML_ERROR_INVALID_ARGUMENT;
    *record = &host->gpu[device->index];
    while (__atomic_load_n(&(*record)->faults, __ATOMIC_RELAXED) & FAULT_HANG) state_pause_ms(5);
    return (nvmlReturn_t)__atomic_load_n(&(*record)->error, __ATOMIC_RELAXED);
}

nvmlReturn_t state_whole(nvmlDevice_t device, struct GpuRecord **record) {
    nvmlReturn_t result = state_device(device, record);
    if (result == NVML_SUCCESS && device->instance != 0) return NVML_ERROR_NOT_SUPPORTED;
    return result;
}

/* The time is taken between the two looks at the sequence: see gpu_file.py. */
nvmlReturn_t state_read(struct GpuRecord *record, struct Live *live, uint64_t *now) {
    for (int attempt = 0; attempt < TRIES; attempt++) {
        uint32_t before = __atomic_load_n(&record->sequence, __ATOMIC_ACQUIRE);
        if (before % 2 == 0) {
            memcpy(live, (const void *)&record->live, sizeof *live);
            uint64_t time = monotonic_ns();
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            if (__atomic_load_n(&record->sequence, __ATOMIC_RELAXED) == before) {
                if (now != NULL) *now = time;
                return NVML_SUCCESS;
            }
        }
        pause_ns(500000);
    }
    return NVML_ERROR_UNKNOWN;
}

uint64_t state_energy(const struct Identity *identity, const struct Live *live, uint64_t now) {
    uint64_t edge = now - (now - identity->born) % identity->counter_step;
    if (edge < live->at) return live->latched;
    return live->counter + (live->counter_rest + live->power * (edge - live->at)) / PICOJOULES;
}

void state_request_limit(struct GpuRecord *record, uint64_t milliwatts) {
    if (record->faults & FAULT_DEAF) return;
    uint64_t before = __atomic_load_n(&record->limit_request, __ATOMIC_RELAXED), after;
    do
        after = ((before >> 32) + 1) << 32 | milliwatts;
    while (!__atomic_compare_exchange_n(&record->limit_request, &before, after, 0,
                                        __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

nvmlReturn_t state_instance(struct GpuRecord *record, unsigned int id, struct InstanceEntry *entry,
                            uint64_t *at) {
    struct Live live;
    nvmlReturn_t result = state_read(record, &live, NULL);
    if (result != NVML_SUCCESS) return result;
    for (uint32_t place = 0; place < live.instances; place++) {
        if (live.instance[place].id != id) continue;
        *entry = live.instance[place];
        if (at != NULL) *at = live.at;
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t state_text(const char *text, char *buffer, unsigned int size) {
    if (buffer == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= size) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return NVML_SUCCESS;
}
