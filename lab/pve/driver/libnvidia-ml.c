/* A stand-in for NVIDIA's libnvidia-ml.so.@VERSION@: it is there, and knows its version. nvidia-smi of the lab does not
 * use it; a program that does is told that nothing is supported (3). */
#include <string.h>

int nvmlInit_v2(void) { return 3; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    strncpy(version, "@VERSION@", length);
    return 0;
}
