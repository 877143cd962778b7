/* A stand-in for NVIDIA's libcuda.so.@VERSION@, built by the stand-in .run file of the lab.
 *
 * Kept: cuInit fails as the real one does: 803 when the loaded kernel module has another version, 100 without a driver or
 * a GPU, 999 when the nodes of uvm or the control node are missing, stale or not permitted. cuDeviceGetCount counts the
 * GPUs whose nodes can be opened. Everything else answers 801, not supported: nothing can be computed with this. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
       NOT_SUPPORTED = 801, DRIVER_MISMATCH = 803, UNKNOWN = 999 };
static int gpus = -1;

/* Without a real driver ENXIO and ENODEV are all that an allowed open gets. */
static int openable(const char *path) {
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file >= 0) { close(file); return 1; }
    return errno == ENXIO || errno == ENODEV;
}

static int major_in_proc(const char *name) {
    char line[256], found[200];
    int number, result = -1;
    FILE *devices = fopen("/proc/devices", "r");
    while (devices && fgets(line, sizeof line, devices))
        if (sscanf(line, "%d %199s", &number, found) == 2 && !strcmp(found, name)) result = number;
    if (devices) fclose(devices);
    return result;
}

static int loaded(void) { /* 1: this version, 0: another, -1: none */
    char line[512] = "";
    FILE *banner = fopen("/proc/driver/nvidia/version", "r");
    if (!banner) return -1;
    if (!fgets(line, sizeof line, banner)) line[0] = 0;
    fclose(banner);
    return strstr(line, "  @VERSION@  ") != NULL;
}

static int count_gpus(void) {
    char path[300], line[256];
    int minor, count = 0;
    struct dirent *entry;
    DIR *directory = opendir("/proc/driver/nvidia/gpus");
    while (directory && (entry = readdir(directory))) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/proc/driver/nvidia/gpus/%s/information", entry->d_name);
        FILE *information = fopen(path, "r");
        while (information && fgets(line, sizeof line, information))
            if (sscanf(line, "Device Minor: %d", &minor) == 1) {
                snprintf(path, sizeof path, "/dev/nvidia%d", minor);
                count += openable(path);
            }
        if (information) fclose(information);
    }
    if (directory) closedir(directory);
    return count;
}

int cuInit(unsigned flags) {
    struct stat uvm;
    if (flags) return INVALID_VALUE;
    switch (loaded()) { case -1: return NO_DEVICE; case 0: return DRIVER_MISMATCH; }
    if (!openable("/dev/nvidiactl")) return errno == ENOENT ? NO_DEVICE : UNKNOWN;
    int count = count_gpus();
    if (count == 0) return NO_DEVICE;
    if (!openable("/dev/nvidia-uvm") || stat("/dev/nvidia-uvm", &uvm)) return UNKNOWN;
    if ((int)major(uvm.st_rdev) != major_in_proc("nvidia-uvm")) return UNKNOWN; /* a node of before the last boot */
    gpus = count;
    return SUCCESS;
}

int cuDriverGetVersion(int *version) { *version = @CUDA@; return SUCCESS; }
int cuDeviceGetCount(int *count) { if (gpus < 0) return NOT_INITIALIZED; *count = gpus; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) {
    if (gpus < 0) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= gpus) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
int cuGetErrorString(int error, const char **text) { *text = error ? "stand-in of the lab" : "no error"; return SUCCESS; }
int cuGetErrorName(int error, const char **text) { *text = error ? "CUDA_ERROR" : "CUDA_SUCCESS"; return SUCCESS; }

/* What the kernel wheels of this repository's stacks link. */
#define UNSUPPORTED(name) int name(void) { return NOT_SUPPORTED; }
UNSUPPORTED(cuPointerGetAttribute)
UNSUPPORTED(cuMemAddressFree)
UNSUPPORTED(cuMemGetAddressRange_v2)
UNSUPPORTED(cuMemRelease)
UNSUPPORTED(cuMemRetainAllocationHandle)
UNSUPPORTED(cuMemSetAccess)
UNSUPPORTED(cuMemUnmap)
