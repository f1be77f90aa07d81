#pragma once

namespace lowpeak::copy {

/// @brief Every wait of the copy engine, by what would be wrong without it.
///
/// A build with LOWPEAK_LEFT_OUT_WAIT=i leaves the i-th out, counted from 1; the tests of such a
/// build must fail, or they would not notice its absence (`nox -s test-mutations`).
enum class Wait {
  none,
  out_for_source,    ///< A copy out reads its source before it is computed.
  in_for_target,     ///< A copy in writes over what the computation still reads.
  in_for_copy_out,   ///< A copy in reads its room before it is written.
  out_for_reader,    ///< A copy out writes over what a copy in still reads.
  out_for_others,    ///< Within the computation: written over by a copy of another stream.
  in_for_others,     ///< Within the computation: the last reader does not stand for those before.
  out_for_slot,      ///< A copy out writes over a slot of the ring that is in use.
  host_for_slot,     ///< The host reads a slot of the ring before the device has written it.
  in_for_slot,       ///< A copy in writes over a slot of the ring that is in use.
  device_for_slot,   ///< The device reads a slot of the ring before the host has written it.
  user_for_copy,     ///< The computation reads what is still being copied, or frees it.
  follow_mark,       ///< A stream takes over a tensor that another stream still computes.
  user_for_failed,   ///< Memory of a copy that failed half way is used while the half is copied.
  release_for_copy,  ///< Host memory is used by others while copies read or write it.
  done_for_copy,     ///< A copy is told to have ended that has not.
  host_for_copies,   ///< synchronize() comes back while copies run.
  end_for_copies,    ///< Host memory goes back to the system while copies run.
  number_of_waits
};

#ifndef LOWPEAK_LEFT_OUT_WAIT
#define LOWPEAK_LEFT_OUT_WAIT 0
#endif
static_assert(LOWPEAK_LEFT_OUT_WAIT >= 0 &&
                  LOWPEAK_LEFT_OUT_WAIT < static_cast<int>(Wait::number_of_waits),
              "LOWPEAK_LEFT_OUT_WAIT names no wait");

constexpr bool kept(Wait wait) noexcept { return static_cast<int>(wait) != LOWPEAK_LEFT_OUT_WAIT; }

}  // namespace lowpeak::copy
