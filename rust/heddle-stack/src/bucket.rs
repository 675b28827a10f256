//! Token buckets.

use smoltcp::time::Instant;

/// The largest rate there is: what a second gives is a number of 64 bits.
const RATE_MAX: i64 = 1 << 40;

/// Hands out so many units a second, and no more than a fortieth of a second's at once, nor less
/// than a five hundredth's: who took a few bytes as they come would do nothing else.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket {
    rate: i64,
    burst: i64,
    /// Millionths of a unit; below 0 after more was taken than there was.
    level: i64,
    at: Instant,
}

const MICRO: i64 = 1_000_000;

impl Bucket {
    /// A rate of 0 is no limit.
    pub(crate) fn new(rate: u64, now: Instant) -> Self {
        let rate = i64::try_from(rate).unwrap_or(RATE_MAX).min(RATE_MAX);
        let burst = (rate / 40).max(1);
        Self { rate, burst, level: burst * MICRO, at: now }
    }

    /// What may be taken now.
    pub(crate) fn available(&mut self, now: Instant) -> usize {
        if self.rate == 0 {
            return usize::MAX;
        }
        let passed = (now - self.at).total_micros();
        let passed = i64::try_from(passed).unwrap_or(MICRO).min(MICRO);
        self.at = now;
        self.level = (self.level + passed * self.rate).min(self.burst * MICRO);
        let level = self.level / MICRO;
        usize::try_from(if level < (self.rate / 500).max(1) { 0 } else { level }).unwrap_or(0)
    }

    pub(crate) fn take(&mut self, units: usize) {
        if self.rate != 0 {
            let units = i64::try_from(units).unwrap_or(i64::MAX);
            self.level = self.level.saturating_sub(units.saturating_mul(MICRO));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_rate() {
        let mut bucket = Bucket::new(1000, Instant::from_micros(0));
        let mut got = 0;
        for ms in 0..2000 {
            let n = bucket.available(Instant::from_millis(ms));
            bucket.take(n);
            got += n;
        }
        assert!((2000..=2050).contains(&got), "{got}");
        // A few units are none.
        let mut busy = Bucket::new(1_000_000, Instant::from_micros(0));
        busy.take(25_000);
        assert_eq!(busy.available(Instant::from_micros(1999)), 0);
        assert_eq!(busy.available(Instant::from_micros(2000)), 2000);
        // Who takes more than there is waits for longer.
        bucket.take(500);
        assert_eq!(bucket.available(Instant::from_millis(2300)), 0);
        assert!(bucket.available(Instant::from_millis(2520)) > 0);
        let mut free = Bucket::new(0, Instant::from_micros(0));
        assert_eq!(free.available(Instant::from_micros(1)), usize::MAX);
    }
}
