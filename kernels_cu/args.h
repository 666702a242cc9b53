// The argument structs of all kernels: included by CUDA, by the CPU build and read by epcomm/runtime/args.py.
// One field a line, no initialisers, no expressions but the names defined here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
typedef float f32;

#define DTYPE_BF16 0
#define DTYPE_F16 1
#define DTYPE_F32 2

#define MAX_topk 32

// Operations that cross ranks, each with its own epoch and entry words.
#define OP_PLAN 0
#define OP_DISPATCH 1
#define OP_COMBINE 2
#define OP_PREFETCH 3
#define OP_REDUCE_GRAD 4
#define OP_LL_DISPATCH 5
#define OP_LL_COMBINE 6
#define OP_MEET 7
#define NUM_OPERATIONS 8

// A chunk's control area, in u32 words: [0] this rank's abort flag; [1] whether its error record is taken; from CONTROL_RAISED_BY on,
// one word a rank that gave up by itself; then one entry word an operation and rank; then, from an even word on, one
// choice an operation and rank, of two words.
#define CONTROL_ABORTED 0
#define CONTROL_REPORTED 1
#define CONTROL_RAISED_BY 32
#define ABORTED_HERE 1
#define ABORTED_BY_PEER 2

// What the first wait that expired saw; in memory that the host reads. Behind it lies a copy of the control area from
// CONTROL_RAISED_BY on, as it was then. peer: -1 = no rank was waited for, since the call began too late.
struct ErrorRecord {
  u32 state;
  u32 peer_raised;
  i32 operation;
  i32 peer;
  u32 seen;
  u32 wanted;
  i32 block;
  i32 thread;
};

// Counters of input that kernels had to ignore: World.bad_input[...].
#define BAD_EXPERT_IDS 0
#define BAD_ROWS 1
#define BAD_TOTALS 2
#define BAD_CHOICES 3
#define NUM_BAD_INPUTS 4

// Who this rank is and where the peers' chunks of the symmetric memory lie.
struct World {
  u8* base;
  i64 stride;
  i64 control;
  struct ErrorRecord* error;
  u32* bad_input;
  i64 timeout_ns;
  i32 rank;
  i32 ranks;
};

// plan.cu: from every rank's routing to the balanced placement of every entry (docs/planner.md).
struct PlanArgs {
  struct World world;
  const void* topk_idx;
  i32* dst;
  i32* num_tokens_per_rank;
  i32* counts;
  i32* cu_seqlens;
  i32* experts_to_copy;
  u32* epochs;
  i64 packets;
  u8* scratch;
  i32 num_tokens;
  i32 index_bytes;
  i32 topk;
  i32 experts;
  i32 row_capacity;
  i32 token_padding;
};

// dispatch.cu: rows to their places on every rank.
struct DispatchArgs {
  struct World world;
  const u8* x;
  const f32* topk_weights;
  const i32* dst;
  const i32* num_tokens_per_rank;
  const i32* counts;
  const i32* cu_seqlens;
  i32* rows;
  f32* row_weights;
  u32* epochs;
  i64 receive;
  i64 records;
  i64 flags;
  i32 num_tokens;
  i32 capacity;
  i32 row_capacity;
  i32 result_rows;
  i32 row_bytes;
  i32 topk;
  i32 segments;
  i32 token_padding;
  i32 ranks;
  i32 send_warps;
  i32 with_weights;
  u32 choice;
};

// meet.cu: all ranks wait for each other.
struct MeetArgs {
  struct World world;
  u32* epochs;
};

// combine.cu: rows back to their tokens, summed.
struct CombineArgs {
  struct World world;
  const u8* x;
  const f32* row_weights;
  u8* out;
  f32* topk_weights;
  const i32* dst;
  const i32* num_tokens_per_rank;
  const i32* rows;
  u32* epochs;
  u32* consumed;
  i64 ring;
  i64 ring_weights;
  i64 flags;
  i64 credits;
  i32 num_tokens;
  i32 x_rows;
  i32 capacity;
  i32 row_capacity;
  i32 row_bytes;
  i32 topk;
  i32 ranks;
  i32 dtype;
  i32 ring_tokens;
  i32 produce_warps;
  i32 with_weights;
  u32 choice;
};

// Expert weights or gradients in mapped memory, one a projection: experts are `stride` bytes apart in all views.
struct Pool {
  u8* full;
  u8* all_slots;
  i64 stride;
  i64 bytes;
};

#define MAX_POOLS 32

// prefetch.cu: this step's copied experts into the own slots.
struct PrefetchArgs {
  struct World world;
  const i32* experts_to_copy;
  i32 experts;
  i32 experts_per_rank;
  i32 num_pools;
  struct Pool pools[MAX_POOLS];
};

// reduce_grad.cu: gradients of copied experts to their homes.
struct ReduceGradArgs {
  struct World world;
  const i32* experts_to_copy;
  u32* epochs;
  u32* blocks_done;
  i64 left;
  i32 experts_per_rank;
  i32 num_pools;
  struct Pool pools[MAX_POOLS];
};

// Where a low-latency dispatch keeps what its handle and its output need: offsets in bytes into one slab a call (docs/low_latency.md).
struct LowLatencySlab {
  i64 rows;
  i64 weights;
  i64 targets;
  i64 route_weights;
  i64 counts;
  i64 layout_range;
  i64 src_info;
  i64 topk_idx;
  i64 topk_weights;
  i64 block_scales;
};

// low_latency_dispatch.cu: few tokens to their experts, one launch.
struct LowLatencyDispatchArgs {
  struct World world;
  const u8* x;
  const void* topk_idx;
  const f32* topk_weights;
  u8* tokens;
  u8* slab;
  u32* epochs;
  struct LowLatencySlab at;
  i64 slots;
  i64 flags;
  i64 masks;
  i64 entries;
  i64 counts;
  i32 num_tokens;
  i32 index_bytes;
  i32 capacity;
  i32 bitmap_words;
  i32 shared_counts;
  i32 shared_masks;
  i32 shared_places;
  i32 shared_table;
  i32 hidden;
  i32 topk;
  i32 experts;
  i32 ranks;
  i32 lines;
  i32 rank_major;
  i32 direct_send;
  i32 fp8;
  i32 power_of_two;
};

// low_latency_combine.cu: their experts' rows back, weighted and summed, one launch.
struct LowLatencyCombineArgs {
  struct World world;
  const u8* x;
  u8* out;
  u8* slab;
  u32* epochs;
  struct LowLatencySlab at;
  i64 slots;
  i64 flags;
  i32 num_tokens;
  i32 capacity;
  i32 hidden;
  i32 topk;
  i32 ranks;
  i32 lines;
  i32 rank_major;
  i32 direct_send;
};
