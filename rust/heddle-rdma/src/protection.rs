//! What keeps containers from each other and from the router, by name, so that a test can do
//! without one of them: an attack has to succeed then. `docs/howto/attack-suite.md`.

/// A protection of the router's.
#[derive(Clone, Copy)]
pub(crate) enum Protection {
    /// Memory is that of the program that connected, and of no program that takes its place.
    AddressSpace,
    /// A page of a program that does not come holds up its own endpoint only.
    Watch,
    /// No endpoint uses up what there is for all.
    Shares,
    /// No endpoint uses up the processor, however many queue pairs it has.
    Rounds,
    /// What an endpoint may copy in a second.
    Caps,
}

/// Whether a protection is in force: always, in the product.
#[cfg(not(feature = "attack"))]
pub(crate) const fn protects(_: Protection) -> bool {
    true
}

/// Whether a protection is in force: not if `HEDDLE_WITHOUT` names it.
#[cfg(feature = "attack")]
pub(crate) fn protects(protection: Protection) -> bool {
    use std::sync::OnceLock;
    static WITHOUT: OnceLock<String> = OnceLock::new();
    let name = match protection {
        Protection::AddressSpace => "address_space",
        Protection::Watch => "watch",
        Protection::Shares => "shares",
        Protection::Rounds => "rounds",
        Protection::Caps => "caps",
    };
    let without = WITHOUT.get_or_init(|| std::env::var("HEDDLE_WITHOUT").unwrap_or_default());
    !without.split(',').any(|w| w == name)
}
