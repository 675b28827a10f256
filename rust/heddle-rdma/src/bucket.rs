//! Token buckets: how much of something an endpoint may have in a time.

use std::time::{Duration, Instant};

/// So many tokens a second, of which those of a moment may be taken at once. What is taken may be
/// more than there is: the rest is waited for afterwards.
pub(crate) struct Bucket {
    /// 0: there is no limit.
    a_second: u64,
    burst: u64,
    left: i64,
    at: Instant,
    /// Who asked last was told to wait.
    waits: bool,
}

impl Bucket {
    pub(crate) fn new() -> Self {
        Self { a_second: 0, burst: 0, left: 0, at: Instant::now(), waits: false }
    }

    /// Sets the limit, 0 for none, and for what time's tokens may be taken at once.
    pub(crate) fn limit(&mut self, a_second: u64, moment: Duration, now: Instant) {
        if self.a_second == a_second {
            return;
        }
        let burst = u128::from(a_second) * moment.as_nanos() / 1_000_000_000;
        self.a_second = a_second;
        self.burst = u64::try_from(burst).unwrap_or(u64::MAX).max(1);
        (self.left, self.at, self.waits) = (0, now, false);
    }

    pub(crate) fn is_limited(&self) -> bool {
        self.a_second > 0
    }

    /// When there will be a token, if there is none now.
    pub(crate) fn until(&mut self, now: Instant) -> Option<Instant> {
        if self.a_second == 0 || self.left > 0 {
            return None;
        }
        let a_second = u128::from(self.a_second);
        let more = now.duration_since(self.at).as_nanos() * a_second / 1_000_000_000;
        let left = i128::from(self.left) + i128::try_from(more).unwrap_or(i128::MAX);
        if left <= 0 {
            let missing = u64::try_from(1 - i128::from(self.left)).unwrap_or(u64::MAX);
            let nanos = (u128::from(missing) * 1_000_000_000).div_ceil(a_second);
            return Some(self.at + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)));
        }
        let full = left >= i128::from(self.burst);
        self.left = i64::try_from(if full { i128::from(self.burst) } else { left }).unwrap_or(1);
        // What is less than a token is not lost.
        let taken = u64::try_from(more * 1_000_000_000 / a_second).unwrap_or(u64::MAX);
        self.at = if full { now } else { self.at + Duration::from_nanos(taken) };
        self.waits = false;
        None
    }

    /// Whether somebody begins to wait.
    pub(crate) fn begins_to_wait(&mut self) -> bool {
        !std::mem::replace(&mut self.waits, true)
    }

    pub(crate) fn take(&mut self, tokens: u64) {
        if self.a_second > 0 {
            self.left = self.left.saturating_sub(i64::try_from(tokens).unwrap_or(i64::MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_in_a_time_is_what_is_allowed() {
        let mut bucket = Bucket::new();
        let start = Instant::now();
        assert_eq!(bucket.until(start), None);
        for (a_second, once) in [(12_500_000, 65_536), (1_250_000_000, 65_536), (500, 1), (7, 3)] {
            bucket.limit(a_second, Duration::from_millis(10), start);
            let (mut taken, mut now, mut waits) = (0, start, 0);
            while taken < a_second * 10 {
                if let Some(at) = bucket.until(now) {
                    assert!(at > now, "{a_second}");
                    // A sleep ends at a whole millisecond.
                    now = at + Duration::from_micros(700);
                    waits += 1;
                } else {
                    bucket.take(once);
                    taken += once;
                }
            }
            let seconds = now.duration_since(start).as_secs_f64();
            assert!((9.9..10.6).contains(&seconds), "{a_second} a second: {seconds}, {waits}");
        }
    }

    #[test]
    fn nobody_saves_more_than_a_moment() {
        let mut bucket = Bucket::new();
        let start = Instant::now();
        bucket.limit(1000, Duration::from_millis(10), start);
        let later = start + Duration::from_secs(5);
        for _ in 0..10 {
            assert_eq!(bucket.until(later), None);
            bucket.take(1);
        }
        assert!(bucket.until(later).is_some());
        assert!(bucket.begins_to_wait() && !bucket.begins_to_wait());
    }
}
