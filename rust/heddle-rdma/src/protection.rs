//! What keeps containers from each other and from the router, by name, so that a test can do
//! without one of them: an attack has to succeed then. `docs/howto/attack-suite.md`. Three are of
//! the memory that both share, and named there: `seals`, `holes` and `indices`.

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
    /// A key is of use with queue pairs of its own PD only.
    Keys,
    /// Nothing beside what was registered is reached by a key.
    Ranges,
    /// A queue pair takes requests of the one only that it names itself.
    Pairs,
    /// Objects are those of the connection that has made them.
    Owners,
    /// A request is looked at where the program cannot change it any more.
    #[cfg(feature = "attack")]
    Copies,
    /// Others have their turn between two requests of a connection.
    Turns,
    /// Who connects and says nothing is hung up on.
    Deadlines,
    /// How many objects an endpoint may have.
    Quotas,
    /// Who has the card's own GID, and which peers without Heddle it reaches by that.
    Outside,
    /// A peer without Heddle hears one queue pair of this node only as the one that it knows.
    Peers,
    /// Members of a multicast group get what policy lets pass to them.
    Groups,
    /// Memory counts for its endpoint as long as anybody has it.
    Kept,
    /// A peer's queue pair of the card is at the card of the peer's node.
    Homes,
    /// What copies of others' datagrams to groups cost.
    Copied,
    /// Memory that was deregistered is not touched any more.
    UnderWay,
    /// The router has no rights, and makes no system calls but those that move bytes.
    Sandbox,
    /// The card's queue pairs are believed to have done what they were asked for.
    Completions,
}

/// Whether a protection is in force: always, in the product.
pub(crate) fn protects(protection: Protection) -> bool {
    shared_ring::protection::protects(match protection {
        Protection::AddressSpace => "address_space",
        Protection::Watch => "watch",
        Protection::Shares => "shares",
        Protection::Rounds => "rounds",
        Protection::Caps => "caps",
        Protection::Keys => "keys",
        Protection::Ranges => "ranges",
        Protection::Pairs => "pairs",
        Protection::Owners => "owners",
        #[cfg(feature = "attack")]
        Protection::Copies => "copies",
        Protection::Turns => "turns",
        Protection::Deadlines => "deadlines",
        Protection::Quotas => "quotas",
        Protection::Outside => "outside",
        Protection::Peers => "peers",
        Protection::Groups => "groups",
        Protection::Kept => "kept",
        Protection::Homes => "homes",
        Protection::Copied => "copied",
        Protection::UnderWay => "under_way",
        Protection::Sandbox => "sandbox",
        Protection::Completions => "completions",
    })
}
