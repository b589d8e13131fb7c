/* Which instruction set the calls go to: the best this machine has, or the one FINBACK_ISA names. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define MEMBER(name, parameters, arguments) void(*name) parameters;
typedef struct {
  const char *name;
  int (*is_here)(void);
  EACH_KERNEL(MEMBER)
} instruction_set;

static int always(void) { return 1; }

#if defined(FINBACK_X86)
static int has_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
static int has_avx512(void) {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

/* Best first. */
static const instruction_set known[] = {
#if defined(FINBACK_X86)
#define AVX512(name, parameters, arguments) name##_avx512,
    {"avx512", has_avx512, EACH_KERNEL(AVX512)},
#define AVX2(name, parameters, arguments) name##_avx2,
    {"avx2", has_avx2, EACH_KERNEL(AVX2)},
#endif
#if defined(__aarch64__)
#define NEON(name, parameters, arguments) name##_neon,
    {"neon", always, EACH_KERNEL(NEON)},
#else
#define BASE(name, parameters, arguments) name##_base,
    {"base", always, EACH_KERNEL(BASE)},
#endif
};

static const instruction_set *chosen;

int32_t finback_set_isa(const char *name) {
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(known[i].name, name) && known[i].is_here()) {
      chosen = &known[i];
      return 1;
    }
  return 0;
}

__attribute__((constructor)) static void choose(void) {
#if defined(FINBACK_X86)
  __builtin_cpu_init();
#endif
  const char *wanted = getenv("FINBACK_ISA");
  if (wanted && finback_set_isa(wanted)) return;
  for (chosen = known; !chosen->is_here();) chosen++;
}

const char *finback_isa(void) { return chosen->name; }

int32_t finback_abi(void) { return FINBACK_ABI; }

const char *finback_compiler(void) { return __VERSION__; }

#define ENTRY(name, parameters, arguments) \
  void finback_##name parameters { chosen->name arguments; }
EACH_KERNEL(ENTRY)
