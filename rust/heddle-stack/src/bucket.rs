//! Token buckets.

use smoltcp::time::Instant;

/// Hands out so many units a second, and no more than a fiftieth of a second's at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bucket {
    rate: u64,
    burst: u64,
    /// Millionths of a unit.
    level: u64,
    at: Instant,
}

const MICRO: u64 = 1_000_000;

impl Bucket {
    /// A rate of 0 is no limit.
    pub(crate) fn new(rate: u64, now: Instant) -> Self {
        let rate = rate.min(1 << 40);
        let burst = (rate / 50).max(1);
        Self { rate, burst, level: burst * MICRO, at: now }
    }

    /// What may be taken now.
    pub(crate) fn available(&mut self, now: Instant) -> usize {
        if self.rate == 0 {
            return usize::MAX;
        }
        let passed = (now - self.at).total_micros().min(MICRO);
        self.at = now;
        self.level = (self.level + passed * self.rate).min(self.burst * MICRO);
        usize::try_from(self.level / MICRO).unwrap_or(usize::MAX)
    }

    pub(crate) fn take(&mut self, units: usize) {
        if self.rate != 0 {
            self.level = self.level.saturating_sub(units as u64 * MICRO);
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
        assert!((2000..=2020).contains(&got), "{got}");
        let mut free = Bucket::new(0, Instant::from_micros(0));
        assert_eq!(free.available(Instant::from_micros(1)), usize::MAX);
    }
}
