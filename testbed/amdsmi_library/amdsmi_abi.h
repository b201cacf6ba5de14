/* The parts of AMD SMI's binary interface that the emulated library implements.
 *
 * Names and sizes are those of the public interface; a test compares them with the package's.
 */
#ifndef WATTSPAN_AMDSMI_ABI_H
#define WATTSPAN_AMDSMI_ABI_H

#include <stddef.h>
#include <stdint.h>

#define AMDSMI_API __attribute__((visibility("default")))

typedef enum {
    AMDSMI_STATUS_SUCCESS = 0,
    AMDSMI_STATUS_INVAL = 1,
    AMDSMI_STATUS_NOT_SUPPORTED = 2,
    AMDSMI_STATUS_NO_PERM = 10,
    AMDSMI_STATUS_INTERNAL_EXCEPTION = 16,
    AMDSMI_STATUS_INPUT_OUT_OF_BOUNDS = 17,
    AMDSMI_STATUS_NOT_FOUND = 31,
    AMDSMI_STATUS_NOT_INIT = 32,
    AMDSMI_STATUS_DRIVER_NOT_LOADED = 34,
} amdsmi_status_t;

enum { CLOCK_GFX = 0, CLOCK_MEM = 4 };
enum { TEMPERATURE_HOTSPOT = 1, TEMPERATURE_CURRENT = 0 };
enum { MEMORY_VRAM = 0 };
enum { LEVEL_AUTO = 0, LEVEL_DETERMINISM = 8 };

typedef struct processor *amdsmi_processor_handle;
typedef struct processor *amdsmi_socket_handle;

typedef struct {
    char market_name[256];
    uint32_t vendor_id;
    char vendor_name[256];
    uint32_t subvendor_id;
    uint64_t device_id;
    uint32_t rev_id;
    char asic_serial[256];
    uint32_t oam_id;
    uint32_t num_of_compute_units;
    uint64_t target_graphics_version;
    uint32_t subsystem_id;
    uint32_t reserved[21];
} amdsmi_asic_info_t;
_Static_assert(sizeof(amdsmi_asic_info_t) == 896, "amdsmi_asic_info_t");

typedef struct {
    char driver_version[256];
    char driver_date[256];
    char driver_name[256];
} amdsmi_driver_info_t;
_Static_assert(sizeof(amdsmi_driver_info_t) == 768, "amdsmi_driver_info_t");

typedef struct {
    uint64_t power_cap;
    uint64_t default_power_cap;
    uint64_t dpm_cap;
    uint64_t min_power_cap;
    uint64_t max_power_cap;
    uint64_t reserved[3];
} amdsmi_power_cap_info_t;
_Static_assert(sizeof(amdsmi_power_cap_info_t) == 64, "amdsmi_power_cap_info_t");

typedef struct {
    uint64_t socket_power;
    uint32_t current_socket_power;
    uint32_t average_socket_power;
    uint64_t gfx_voltage;
    uint64_t soc_voltage;
    uint64_t mem_voltage;
    uint32_t power_limit;
    uint64_t reserved[18];
} amdsmi_power_info_t;
_Static_assert(sizeof(amdsmi_power_info_t) == 192, "amdsmi_power_info_t");

typedef struct {
    uint32_t clk;
    uint32_t min_clk;
    uint32_t max_clk;
    uint8_t clk_locked;
    uint8_t clk_deep_sleep;
    uint32_t reserved[4];
} amdsmi_clk_info_t;
_Static_assert(sizeof(amdsmi_clk_info_t) == 32, "amdsmi_clk_info_t");

typedef struct {
    uint32_t gfx_activity;
    uint32_t umc_activity;
    uint32_t mm_activity;
    uint32_t reserved[13];
} amdsmi_engine_usage_t;
_Static_assert(sizeof(amdsmi_engine_usage_t) == 64, "amdsmi_engine_usage_t");

typedef struct {
    char name[256];
    uint32_t pid;
    uint64_t mem;
    struct {
        uint64_t gfx;
        uint64_t enc;
        uint32_t reserved[12];
    } engine_usage;
    struct {
        uint64_t gtt_mem;
        uint64_t cpu_mem;
        uint64_t vram_mem;
        uint32_t reserved[10];
    } memory_usage;
    char container_name[256];
    uint32_t cu_occupancy;
    uint32_t reserved[11];
} amdsmi_proc_info_t;
_Static_assert(sizeof(amdsmi_proc_info_t) == 704, "amdsmi_proc_info_t");

#endif
