/* The kernels of areal_core for C and C++, without torch and without Python. C99 or newer, C++11 or newer.
 *
 * Arguments. A function takes structs of plain values and raw pointers. Initialise a struct to zero, set its first
 * field to its size, then the fields you need:
 *
 *     areal_gae_args args = {0};
 *     args.size = sizeof args;
 *     args.tokens = 6;
 *
 * Zero or NULL means "not given", whatever a field is, so fields added later change nothing for a program compiled
 * before. A program compiled with a newer header than the library runs as long as it leaves the new fields zero;
 * otherwise the call returns AREAL_UNSUPPORTED. Every field is 8 bytes wide.
 *
 * Arrays are contiguous unless a stride is given, and belong to the caller. Sizes count elements; masks are bytes of 0
 * or 1; cu_seqlens is int64 [sequences + 1], starts at 0 and never decreases: sequence s is the tokens
 * [cu_seqlens[s], cu_seqlens[s+1]). `real` is float, or double where the struct's dtype is AREAL_FLOAT64.
 *
 * Devices. *_cpu functions take host pointers and are done when they return. *_cuda functions take pointers to memory
 * of the current CUDA device and a cudaStream_t as void* (NULL: the default stream); they queue work and return without
 * waiting, allocate nothing, and can be captured in a CUDA graph. Values in device memory are not checked. In a library
 * built without CUDA they return AREAL_UNSUPPORTED.
 *
 * Errors. Every function that can fail returns an areal_status; areal_last_error() gives the text. Nothing throws or
 * exits. Functions may be called from any number of threads at once, except those that say otherwise. Results are the
 * same bits from run to run, and on the CPU for any number of threads.
 *
 * The mathematics of each op and what it does with masked, empty and non-finite input: docs/ops.md. */
#ifndef AREAL_CORE_AREAL_CORE_H
#define AREAL_CORE_AREAL_CORE_H

#include <areal_core/advantages.h>
#include <areal_core/base.h>
#include <areal_core/logprob.h>
#include <areal_core/loss.h>
#include <areal_core/packing.h>

#endif /* AREAL_CORE_AREAL_CORE_H */
