/* Access to the file of emulated GPUs. Its layout (layout.h) is generated. */
#ifndef WATTSPAN_STATE_H
#define WATTSPAN_STATE_H

#include "layout.h"
#include "nvml_abi.h"

/* The target of a handle: a GPU, or one MIG instance of it (instance > 0). */
struct nvmlDevice_st {
    unsigned int index;
    unsigned int instance;
};

struct HostRecord *state_host(void);
nvmlReturn_t state_ready(void);                /* the driver answers */
nvmlDevice_t state_handle(unsigned int index, unsigned int instance);
nvmlReturn_t state_device(nvmlDevice_t device, struct GpuRecord **record);  /* the GPU answers */
nvmlReturn_t state_whole(nvmlDevice_t device, struct GpuRecord **record);   /* and is no instance */
int state_forbids(const struct GpuRecord *record); /* to set anything */
nvmlReturn_t state_read(struct GpuRecord *record, struct Live *live, uint64_t *now);
/* Microjoules at the counter's latest edge before `now`. */
uint64_t state_energy(const struct Identity *identity, const struct Live *live, uint64_t now);
/* Ask the owner for a power limit; a deaf GPU ignores it. */
void state_request_limit(struct GpuRecord *record, uint64_t milliwatts);
/* An instance by its id, and the time of its activity. */
nvmlReturn_t state_instance(struct GpuRecord *record, unsigned int id, struct InstanceEntry *entry,
                            uint64_t *at);
nvmlReturn_t state_text(const char *text, char *buffer, unsigned int size);
uint64_t state_unix_us(void);
void state_pause_ms(unsigned int milliseconds);

#endif
