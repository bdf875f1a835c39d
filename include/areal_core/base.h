/* The library itself: version, errors, element types, threads. See areal_core.h for the conventions. */
#ifndef AREAL_CORE_BASE_H
#define AREAL_CORE_BASE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define AREAL_API __attribute__((visibility("default")))
#else
#define AREAL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Counts incompatible changes of this header. areal_abi_version() is that of the loaded library: they must be equal. */
#define AREAL_ABI_VERSION 1
AREAL_API int64_t areal_abi_version(void);
AREAL_API const char* areal_version(void); /* of the package, such as "0.1.0" */
AREAL_API int64_t areal_has_cuda(void);    /* 1: built with the CUDA kernels */
AREAL_API const char* areal_isa(void);     /* the instruction set in use: "baseline", "avx2" or "avx512" */

typedef int32_t areal_status;
enum {
  AREAL_OK = 0,
  AREAL_INVALID_ARGUMENT = 1, /* a broken contract; the text is "<function>: expected <what>, got <value>" */
  AREAL_UNSUPPORTED = 2,      /* this build or this version cannot do it */
  AREAL_CUDA_ERROR = 3,       /* the CUDA runtime refused a launch */
  AREAL_OUT_OF_MEMORY = 4,
  AREAL_INTERNAL_ERROR = 5
};
/* The text of the last call in this thread that failed, "" before one has; valid until the next failure. */
AREAL_API const char* areal_last_error(void);

/* Element types, for the fields named dtype. */
enum { AREAL_FLOAT32 = 0, AREAL_BFLOAT16 = 1, AREAL_FLOAT16 = 2, AREAL_FLOAT64 = 3 };

/* Estimators of the KL to the reference policy from one sample. */
enum { AREAL_KL_K1 = 0, AREAL_KL_K2 = 1, AREAL_KL_K3 = 2, AREAL_KL_K3_UNBIASED = 3 }; /* the last: of losses */

/* ---- threads of the CPU functions ---- */

/* Threads that a call may use, the calling one included; 1 at first. The library keeps that many for the whole process;
 * while one call uses them, others run in their own thread. Not while another call is running. */
AREAL_API areal_status areal_set_num_threads(int64_t threads);
AREAL_API int64_t areal_num_threads(void);

/* Lends the library a thread pool instead. parallel_for splits [begin, end) into pieces of at least `grain`, runs
 * body(body_context, piece_begin, piece_end) on each and returns when all are done; a body never throws. */
typedef void (*areal_body_fn)(void* body_context, int64_t begin, int64_t end);
typedef struct areal_thread_pool {
  size_t size;
  void* context; /* handed to both functions */
  void (*parallel_for)(void* context, int64_t begin, int64_t end, int64_t grain, areal_body_fn body,
                       void* body_context);
  int64_t (*num_threads)(void* context);
} areal_thread_pool;
/* NULL: back to the library's own threads. Not while another call is running. */
AREAL_API areal_status areal_set_thread_pool(const areal_thread_pool* pool);

#ifdef __cplusplus
}
#endif

#endif /* AREAL_CORE_BASE_H */
