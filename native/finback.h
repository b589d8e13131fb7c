/* The whole interface of the native core. Python's twin is finback/kernels/cpu.py. */
#ifndef FINBACK_H
#define FINBACK_H

#include <stdint.h>

#define FINBACK_ABI 1
#define FINBACK_API __attribute__((visibility("default")))

/* The number of this interface; the caller refuses a library with another one. */
FINBACK_API int32_t finback_abi(void);

/* The compiler that built the library, a static string. */
FINBACK_API const char *finback_compiler(void);

#endif
