#include "finback.h"

int32_t finback_abi(void) { return FINBACK_ABI; }

const char *finback_compiler(void) { return __VERSION__; }
