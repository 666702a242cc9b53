// meet: every rank waits until all have come, and so are past all that they did before.
#include "protocol.cuh"

KERNEL(meet, MeetArgs) {
  u32 epoch;
  if (!begin_call(a.world, OP_MEET, a.epochs, epoch)) return;
  peers_entered(a.world, OP_MEET, epoch);
  end_call(a.epochs, epoch);
}
