//! Whether a worker that has nothing to do looks for work for a time before it sleeps.

use std::time::{Duration, Instant};

/// So many waits at most go by without a look after one that was in vain.
const SKIPS_MOST: u32 = 63;

/// After each look that was in vain twice as many waits are slept through at once, so that a worker
/// whose work comes late loses a 64th of them to looking, and one whose work comes soon is told by
/// no call. No clock is read for a wait that is slept through: how long it took says little, as
/// waking up may take longer than what was waited for.
#[derive(Debug, Default)]
pub(super) struct Spin {
    since: Option<Instant>,
    misses: u32,
    skips: u32,
}

impl Spin {
    /// Something came. If that was while it looked, it looks the next time, too.
    pub(super) fn came(&mut self) {
        if self.since.take().is_some() {
            self.misses = 0;
        }
    }

    /// There is nothing to do: whether the worker looks on, for this time at most.
    pub(super) fn goes_on(&mut self, now: Instant, time: Duration) -> bool {
        match self.since {
            Some(since) if now.duration_since(since) < time => return true,
            Some(_) => {
                self.since = None;
                self.misses = (2 * self.misses + 1).min(SKIPS_MOST);
                self.skips = self.misses;
            }
            None if time.is_zero() => {}
            None if self.skips > 0 => self.skips -= 1,
            None => {
                self.since = Some(now);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_micros(20);

    /// How many of so many waits are looked for, nothing coming within the time.
    fn looks_in_vain(spin: &mut Spin, waits: u32) -> u32 {
        let mut now = Instant::now();
        let wait = |_: &u32| {
            let looks = spin.goes_on(now, TIME);
            now += TIME;
            assert!(!looks || !spin.goes_on(now, TIME), "it looks for longer than it may");
            looks
        };
        u32::try_from((0..waits).filter(wait).count()).unwrap()
    }

    #[test]
    fn looks_in_vain_become_rare() {
        let mut spin = Spin::default();
        assert_eq!(looks_in_vain(&mut spin, 127), 7);
        assert_eq!(looks_in_vain(&mut spin, 6400), 100);
    }

    #[test]
    fn what_comes_in_time_has_it_look_again() {
        let mut spin = Spin::default();
        looks_in_vain(&mut spin, 127);
        while !spin.goes_on(Instant::now(), TIME) {}
        for _ in 0..100 {
            spin.came();
            assert!(spin.goes_on(Instant::now(), TIME));
        }
    }

    #[test]
    fn without_a_time_it_does_not_look() {
        let mut spin = Spin::default();
        assert!((0..9).all(|_| !spin.goes_on(Instant::now(), Duration::ZERO)));
        let now = Instant::now();
        assert!(spin.goes_on(now, TIME));
        // Who wanted it has gone.
        assert!(!spin.goes_on(now, Duration::ZERO));
    }
}
