//! A group whose tables are shared by many ranks. Each rank has the rows of the keys that it owns in a group of its own.
//!
//! A lookup makes the ids of this rank's batch distinct, asks the owners for their rows, and pools the rows that come back. The
//! owner of a localized table pools the bags itself where that moves fewer bytes. A push merges gradients to one for each key. A commit
//! sends them to the owners, which give them to their own groups as the gradients of one lookup of all ranks' keys, in the order of the
//! ranks. Apply is each owner's own.

mod at_owner;
mod calls;
mod commit;
mod group;
mod lookup;
mod owned;
mod pool;
mod push;
mod received;
mod requests;
mod sent;
mod serve;
mod shards;

pub use self::group::ShardedGroup;
pub use self::owned::counts_ids;
pub use self::serve::LookupMode;
pub use self::shards::Shards;
