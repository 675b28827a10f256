//! Protections by name, so that a test can do without one of them: an attack has to succeed then.
//! `docs/howto/attack-suite.md`.

/// Whether a protection is in force: always, in the product.
#[cfg(not(feature = "attack"))]
#[must_use]
pub const fn protects(_: &str) -> bool {
    true
}

/// Whether a protection is in force: not if `HEDDLE_WITHOUT` names it.
#[cfg(feature = "attack")]
#[must_use]
pub fn protects(name: &str) -> bool {
    use std::sync::OnceLock;
    static WITHOUT: OnceLock<String> = OnceLock::new();
    let without = WITHOUT.get_or_init(|| std::env::var("HEDDLE_WITHOUT").unwrap_or_default());
    !without.split(',').any(|w| w == name)
}
