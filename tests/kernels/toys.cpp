// Small kernels that use, and misuse, every part of the device vocabulary. As a library they are called through
// toy_launch; with TOYS_MAIN they are a program that runs the well-behaved ones, for the sanitizers.
#include "device.cuh"
#include "numeric.cuh"

struct ToyArgs {
  u32* in;
  u32* out;
  u8* peer;  // shared by ranks
  i32 n;
  i32 rank;
  i32 ranks;
  i32 wrong;  // 1: leave out what makes the kernel right
};

DEV i32 global_thread() { return block_index() * block_threads() + thread_index(); }

KERNEL(identity, ToyArgs) {
  u32* row = a.out + global_thread() * 6;
  row[0] = (u32)block_index(), row[1] = (u32)thread_index(), row[2] = (u32)grid_blocks();
  row[3] = (u32)block_threads(), row[4] = (u32)lane_index(), row[5] = (u32)(warp_index() * 100 + block_warps());
}

KERNEL(collectives, ToyArgs) {
  const u32 x = a.in[global_thread()];
  u32* row = a.out + global_thread() * 10;
  row[0] = warp_shfl(x, (i32)(x % WARP));
  row[1] = warp_shfl_xor(x, 5);
  row[2] = warp_shfl_up(x, 3);
  row[3] = warp_ballot(x % 3 == 0);
  row[4] = warp_match_any(x % 4);
  row[5] = (u32)warp_max((i32)x - 50);
  row[6] = (u32)warp_any(x == 7) + 2 * (u32)warp_all(x < 1000);
  row[7] = (u32)(warp_shfl((u64)x << 33, 1) >> 33);
  row[8] = f32_bits(warp_shfl_xor((f32)x, 1));
  row[9] = lanes_below();
}

// Neighbours in the block exchange values through shared memory, again and again.
KERNEL(rotate, ToyArgs) {
  u32* slot = (u32*)smem();
  u32 x = (u32)thread_index();
  for (i32 i = 0; i < a.n; i++) {
    slot[thread_index()] = x;
    if (!a.wrong) block_sync();
    x = slot[(thread_index() + 1) % block_threads()];
    block_sync();
  }
  a.out[global_thread()] = x;
}

// The same in a warp.
KERNEL(rotate_warp, ToyArgs) {
  u32* slot = (u32*)smem() + warp_index() * WARP;
  u32 x = (u32)lane_index();
  for (i32 i = 0; i < a.n; i++) {
    slot[lane_index()] = x;
    if (!a.wrong) warp_sync();
    x = slot[(lane_index() + 1) % WARP];
    warp_sync();
  }
  a.out[global_thread()] = x;
}

// Threads leave one after the other; the others still meet.
KERNEL(leavers, ToyArgs) {
  u32 rounds = 0;
  for (; rounds < (u32)thread_index() / 32 + 1; rounds++) block_sync();
  a.out[global_thread()] = rounds * 2 + (block_any(thread_index() == block_threads() - 1) ? 1 : 0);
}

// Warp 0 produces, the others consume in turn, each pair with a barrier of its own.
KERNEL(named, ToyArgs) {
  u32* slot = (u32*)smem();
  if (warp_index() == 0) {
    for (i32 w = 1; w < block_warps(); w++) {
      slot[w * WARP + lane_index()] = (u32)(w * 1000 + lane_index());
      named_sync(w, 2 * WARP);
    }
  } else {
    named_sync(warp_index(), 2 * WARP);
    a.out[global_thread()] = slot[warp_index() * WARP + (lane_index() + 1) % WARP];
  }
}

// Every thread adds to counters in shared and global memory.
KERNEL(counters, ToyArgs) {
  u32* mine = (u32*)smem();
  if (thread_index() == 0) *mine = 0;
  block_sync();
  atomic_add(mine, 2);
  atomic_or(a.out + 3, 1u << (thread_index() % 32));
  u32 old = atomic_inc_wrap_gpu(a.out + 1, (u32)(grid_blocks() * block_threads() - 1));
  if (old == (u32)(grid_blocks() * block_threads() - 1)) st_release_gpu(a.out + 2, 99);
  while (ld_acquire_gpu(a.out + 2) != 99) spin_hint();
  block_sync();
  if (thread_index() == 0) atomic_add_gpu(a.out, *mine);
  if (global_thread() == 0) a.out[4] = atomic_exch_gpu(a.out + 5, 7);
}

// Rows through shared memory, two in flight: wrong = 1 reads without mbarrier_wait, 2 reuses without row_wait_read,
// 3 raises the flag without row_wait, 4 exits without any wait for its last stores, 5 forgets row_commit,
// 6 exits with a load under way.
KERNEL(rows, ToyArgs) {
  constexpr i32 ROW = 256;
  u64* bar = (u64*)smem();
  u8* stage = smem() + 128;
  if (thread_index() == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init(bar + 1, 1);
    mbarrier_fence();
    u32 parity[2] = {0, 0};
    for (i32 i = block_index(); i < a.n; i += grid_blocks()) {
      const i32 s = (i / grid_blocks()) % 2;
      if (a.wrong != 2) row_wait_read<1>();
      mbarrier_expect(bar + s, ROW);
      row_load(stage + s * ROW, (u8*)a.in + (i64)i * ROW, ROW, bar + s);
      if (a.wrong == 6) {
        st_release_gpu((u32*)a.peer + block_index(), 1);
        return;
      }
      if (a.wrong != 1) mbarrier_wait(bar + s, parity[s]);
      parity[s] ^= 1;
      fence_async_shared();
      row_store((u8*)a.out + (i64)i * ROW, stage + s * ROW, ROW);
      if (a.wrong != 5) row_commit();
    }
    if (a.wrong == 4 || a.wrong == 5) {
      if (a.wrong == 5) row_wait<0>();
      return;
    }
    if (a.wrong != 3) row_wait<0>();
    st_release_gpu((u32*)a.peer + block_index(), 1);
    row_wait_read<0>();
  } else if (thread_index() == WARP) {  // sums what block 0's rows hold when the flag is up
    while (ld_acquire_gpu((u32*)a.peer + block_index()) == 0) spin_hint();
    u32 sum = 0;
    for (i32 i = block_index(); i < a.n; i += grid_blocks())
      for (i32 j = 0; j < ROW / 4; j++) sum += a.out[i * ROW / 4 + j];
    a.out[a.n * ROW / 4 + block_index()] = sum;
  }
}

// All threads wait for the load that thread 0 issues late.
KERNEL(late_load, ToyArgs) {
  u64* bar = (u64*)smem();
  if (thread_index() == 0) mbarrier_init(bar, 2);
  block_sync();
  if (thread_index() == 1) mbarrier_expect(bar, 0);
  if (thread_index() == 0) {
    for (i32 i = 0; i < 100; i++) spin_hint();
    mbarrier_expect(bar, 128);
    row_load(smem() + 128, a.in, 128, bar);
  }
  mbarrier_wait(bar, 0);
  a.out[global_thread()] = ((u32*)(smem() + 128))[thread_index() % 32];
}

// Ranks in a ring send each other lines, packets and flagged words, n times; counts what is not as it must be.
KERNEL(talk, ToyArgs) {
  const i32 to = (a.rank + 1) % a.ranks, lines = block_warps() * 4;
  u8* theirs = a.peer + (i64)to * 65536;
  u8* mine = a.peer + (i64)a.rank * 65536;
  u32* read_by_next = (u32*)(mine + 65536 - 128);
  u32 wrong = 0;
  for (u32 epoch = 1; epoch <= (u32)a.n; epoch++) {
    while ((i32)(ld_acquire(read_by_next) - (epoch - 2)) < 0 && epoch > 2) spin_hint();  // two slots by parity
    warp_sync();
    const i32 line = warp_index() * 4 + lane_index() / 8;
    const i32 slot = (i32)(epoch & 1) * lines + line;
    Vec16 v{epoch, (u32)a.rank, (u32)line, (u32)lane_index()};
    line_store(theirs + slot * 128, v, epoch);
    Vec16 got{0, 0, 0, 0};
    while (!line_load(mine + slot * 128, got, epoch)) spin_hint();
    if (lane_index() % 8 != 7 && (got.x != epoch || got.y != (u32)((a.rank + a.ranks - 1) % a.ranks) || got.w != (u32)lane_index())) wrong++;
    const i64 at = 32768 + ((epoch & 1) * block_threads() + thread_index()) * 16;
    packet_store(theirs + at, Vec16{epoch * 3, epoch * 5, epoch * 7, epoch});
    do got = packet_load(mine + at);
    while (got.w != epoch && (spin_hint(), true));
    if (got.x != epoch * 3 || got.y != epoch * 5 || got.z != epoch * 7) wrong++;
    // Plain data behind one fence and relaxed flags.
    u32* data = (u32*)(theirs + 49152) + (epoch & 1) * 64;
    if (thread_index() == 0) {
      for (i32 i = 0; i < 32; i++) data[i] = epoch + (u32)i;
      fence_sys();
      st_relaxed(data + 32, epoch);
      const u32* here = (u32*)(mine + 49152) + (epoch & 1) * 64;
      while (ld_acquire(here + 32) != epoch) spin_hint();
      for (i32 i = 0; i < 32; i++) wrong += here[i] != epoch + (u32)i;
    }
    block_sync();
    if (thread_index() == 0) st_release((u32*)(a.peer + (i64)((a.rank + a.ranks - 1) % a.ranks + 1) * 65536 - 128), epoch);
  }
  red_add_release_sys(a.out, wrong);
}

// The order in which threads come by.
KERNEL(order, ToyArgs) {
  for (i32 i = 0; i < a.n; i++) {
    u32 place = atomic_add(a.out, 1);
    a.out[1 + place] = (u32)thread_index();
    spin_hint();
  }
}

[[gnu::noinline]] DEV u32 fill_stack() {
  volatile u8 room[simt::STACK_BYTES - simt::STACK_RESERVE];
  for (size_t i = 0; i < sizeof room; i++) room[i] = u8(i);
  return room[5];
}

KERNEL(misuse, ToyArgs) {
  u64* bar = (u64*)smem();
  switch (a.n) {
    case 0:
      if (lane_index() != 3) warp_sync();
      break;
    case 1:
      if (warp_index() == 1) named_sync(4, 96);
      block_sync();
      break;
    case 2:
      mbarrier_init(bar, 1);
      mbarrier_wait(bar, 0);
      break;
    case 3:
      if (lane_index() == 0) warp_sync();
      else warp_any(true);
      break;
    case 4: load16((u8*)a.in + 4); break;
    case 5:
      mbarrier_init(bar, 1);
      row_load(smem() + 8, a.in, 16, bar);
      break;
    case 6:
      mbarrier_init(bar, 1);
      row_load(smem() + 1008, a.in, 32, bar);
      break;
    case 7:
      if (thread_index() == 0) smem()[1024 + 5] = 1;
      break;
    case 8:
      if (thread_index() == 40) a.out[0] = fill_stack();
      break;
    case 9: named_sync(2, warp_index() == 0 ? 64 : 32); break;
    case 10:
      mbarrier_init(bar, 1);
      mbarrier_expect(bar, 16);
      mbarrier_expect(bar, 16);
      break;
    case 11: named_sync(16, 32); break;
    case 12: named_sync(1, 256); break;
  }
}

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int toy_launch(const char* name, unsigned grid, unsigned block, size_t shared, const ToyArgs* args) { return simt::launch(name, grid, block, shared, args); }
EXPORT const char* toy_error() { return simt::machine().error.c_str(); }
EXPORT void toy_schedule(u64 seed) { simt::set_schedule(seed); }

// Number formats, element by element: the test compares all of them with ml_dtypes.
EXPORT void convert(int what, const void* in, void* out, size_t n) {
  auto* floats = static_cast<const f32*>(in);
  auto* words = static_cast<const u16*>(in);
  auto* bytes = static_cast<const u8*>(in);
  for (size_t i = 0; i < n; i++) switch (what) {
      case 0: static_cast<u16*>(out)[i] = f32_to_bf16(floats[i]); break;
      case 1: static_cast<u16*>(out)[i] = f32_to_f16(floats[i]); break;
      case 2: static_cast<u8*>(out)[i] = f32_to_e4m3(floats[i]); break;
      case 3: static_cast<f32*>(out)[i] = bf16_to_f32(words[i]); break;
      case 4: static_cast<f32*>(out)[i] = f16_to_f32(words[i]); break;
      case 5: static_cast<f32*>(out)[i] = e4m3_to_f32(bytes[i]); break;
    }
}
template <i32 DTYPE>
void there_and_back(const Vec16* in, f32* floats, Vec16* out) {
  unpack<DTYPE>(*in, floats);
  *out = pack<DTYPE>(floats);
}
EXPORT void vectors(int dtype, const Vec16* in, f32* floats, Vec16* out) {
  if (dtype == DTYPE_BF16) there_and_back<DTYPE_BF16>(in, floats, out);
  if (dtype == DTYPE_F16) there_and_back<DTYPE_F16>(in, floats, out);
  if (dtype == DTYPE_F32) there_and_back<DTYPE_F32>(in, floats, out);
}
EXPORT void arithmetic(f32 x, f32 y, f32 z, f32* out) {
  out[0] = fma_rn(x, y, z), out[1] = add_rn(mul_rn(x, y), z), out[2] = div_rn(x, y);
}

#ifdef TOYS_MAIN
#include <thread>

static void must(const char* name, u32 grid, u32 block, ToyArgs args) {
  if (simt::launch(name, grid, block, 1024, &args) == simt::LAUNCHED) return;
  fprintf(stderr, "%s\n", simt::machine().error.c_str());
  exit(1);
}

int main(int argc, char**) {
  alignas(128) static u32 in[8192], out[8192];
  alignas(128) static u8 peer[3 * 65536];
  for (u32 i = 0; i < 8192; i++) in[i] = i % 97;
  if (argc > 1) {  // a race, for TSan to find
    must("rotate", 1, 64, {in, out, peer, 2, 0, 1, 1});
    return 0;
  }
  for (u64 seed = 0; seed < 2; seed++) {
    simt::set_schedule(seed);
    must("identity", 2, 32, {in, out, peer, 0, 0, 1, 0});
    must("collectives", 1, 64, {in, out, peer, 0, 0, 1, 0});
    must("rotate", 1, 64, {in, out, peer, 3, 0, 1, 0});
    must("rotate_warp", 1, 64, {in, out, peer, 3, 0, 1, 0});
    must("leavers", 1, 64, {in, out, peer, 0, 0, 1, 0});
    must("named", 1, 96, {in, out, peer, 0, 0, 1, 0});
    memset(out, 0, sizeof out);
    must("counters", 2, 32, {in, out, peer, 0, 0, 1, 0});
    memset(peer, 0, sizeof peer);
    must("rows", 2, 64, {in, out, peer, 9, 0, 1, 0});
    must("late_load", 1, 64, {in, out, peer, 0, 0, 1, 0});
    memset(peer, 0, sizeof peer);
    out[0] = 0;
    std::thread ranks[3];
    for (i32 r = 0; r < 3; r++) ranks[r] = std::thread([=] { must("talk", 1, 32, {in, out, peer, 4, r, 3, 0}); });
    for (auto& rank : ranks) rank.join();
    if (out[0] != 0) return 2;
  }
  ToyArgs stuck{in, out, peer, 0, 0, 1, 0};
  if (simt::launch("misuse", 1, 64, 1024, &stuck) != simt::FAILED) return 3;
  must("rotate", 1, 64, {in, out, peer, 3, 0, 1, 0});
}
#endif
