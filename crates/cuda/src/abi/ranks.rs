//! The structs of ranks that share tables.

#![allow(unsafe_code)]

use super::constants::*;
use super::macros::{InCuda, struct_text};
use crate::memory::Plain;

structs! {
    /// A slot of the set of a call's distinct keys.
    #[repr(align(16))]
    pub struct KeySlot {
        /// The key; all bits are set if the slot is empty.
        pub key: u64,
        /// Place in the call of the key's first id.
        pub first: u32,
        /// Place of the key among the keys of its table that are asked for.
        pub place: u32,
    }

    /// The keys of a table that a rank asks for in a call.
    pub struct Request {
        /// The set of distinct keys of each merge block, and of ids of weight 0: `num_slots` slots, and one for the key that marks empty
        /// slots.
        pub slots: u64 as "KeySlot*",
        /// Output: the distinct keys, by owner, then by merge block, then in the order of their first ids.
        pub keys: u64 as "u64*",
        /// Output, `(2 * ranks + 1,)`: where the keys of each owner start, and those among them of weight 0.
        pub starts: u64 as "u32*",
        /// `(classes, blocks)`: number of first ids of a block by class, later the place of the first one.
        pub counts: u64 as "u32*",
        /// Output: a copy of the ids, for an owner that pools their rows. Otherwise null, as `numbers`.
        pub ids: u64 as "u64*",
        /// Output, by id: the place of its key plus 1; 0 if it asks for no row.
        pub numbers: u64 as "u32*",
        /// Output, by place of a key: the number of its ids that get gradients. Null unless the table's policy counts ids.
        pub id_counts: u64 as "u64*",
        /// Output, by place of a key: its highest score, as `ScoreType::Sent`. Null unless the table's rows have scores that come with ids.
        pub scores: u64 as "u64*",
        /// Output, in memory that the host reads: number of distinct keys << 32 | number of ids.
        pub distinct: u64 as "u64*",
        /// Place of the table's first id in the call.
        pub first: u32,
        pub num_ids: u32,
        /// The table's blocks of `REQUEST_BLOCK` ids.
        pub first_block: u32,
        pub num_blocks: u32,
        pub num_slots: u32,
        /// `OwnerKind`
        pub owner: u32,
        /// The owner, if one rank owns all keys, or if each has all: then this rank.
        pub home: u32,
        pub pad: u32,
    }

    /// What a rank asks for in a call.
    pub struct Requests {
        /// By table of the group. A table that takes no part has no ids.
        pub requests: u64 as "const Request*",
        pub num_tables: u32,
        pub world_size: u32,
        /// Merge blocks of a rank.
        pub merge_blocks: u32,
        /// Whether the rows of ids of weight 0 are asked for, for the gradients of weights.
        pub asks_silent: u32,
        /// By place of an id: takes the number of its row if it gets a gradient, otherwise 0. Null unless `asks_silent`.
        pub active: u64 as "u32*",
        /// By place of an id: its key, of calls that are made distinct ahead. Otherwise null.
        pub copies: u64 as "u64*",
        /// Whether the keys of the call are others than the copies. Null before the call, and if nothing was done ahead of it.
        pub differs: u64 as "u32*",
        /// By place of an id: its key and score. Null if the call has no scores.
        pub given: u64 as "const KeyScore*",
    }

    /// A failure between ranks, in memory of the host.
    pub struct RankState {
        /// Not 0 if nobody is to wait for other ranks any more.
        pub is_aborted: u32,
        /// Which rank a kernel has waited for in vain, plus 1.
        pub silent: u32,
        /// `Flag` that it has waited for.
        pub flag: u32,
        pub pad: u32,
        /// Number of the call.
        pub call: u64,
    }

    /// How a rank reaches the others.
    pub struct Peers {
        /// By rank: the address of its flags, `(flags, MAX_RANKS)` by `Flag` and by the rank that sets them. Null with NCCL.
        pub flags: [u64; MAX_RANKS],
        pub state: u64 as "RankState*",
        /// Nanoseconds after which a rank that is waited for is taken for lost.
        pub timeout: u64,
        pub rank: u32,
        pub world_size: u32,
    }

    /// A lookup that a rank serves: one feature for each table and rank.
    pub struct Serving {
        /// By table of the call and rank. Their numbers of ids, and where these begin, are not known to the host.
        pub features: u64 as "Feature*",
        /// By table of the call; null if the lookup is not saved.
        pub sections: u64 as "Section*",
        /// By feature: its first block in `find_records`.
        pub first_find: u64 as "u32*",
        pub tables: u64 as "const Table*",
        pub requests: u64 as "const Request*",
        /// By rank: the starts of the keys it asks for, `(tables, 2 * ranks + 1)`.
        pub starts: [u64; MAX_RANKS],
        /// Output, by feature: where its keys begin among those of the rank.
        pub begins: u64 as "u32*",
        /// Output, by feature: the place of its first key in the call.
        pub firsts: u64 as "u32*",
        /// Number of tables of the call.
        pub num_tables: u32,
        /// Whether the features of ids of weight 0 follow, one for each table and rank.
        pub has_silent: u32,
    }

    /// A feature of another rank whose bags this rank pools.
    pub struct PooledFeature {
        /// By id: as `Request::numbers`, in memory of the other rank.
        pub numbers: u64 as "const u32*",
        /// Place of the rank's first key of the table among the keys that this rank looks up; or null if the host knows it.
        pub first_key: u64 as "const u32*",
        /// That place, if the host knows it.
        pub known_first_key: u32,
        /// Number of rows that earlier ranks have of the table. The rank's rows follow them.
        pub first_row: u32,
    }

    /// What `number_pooled` reads and writes besides the features.
    pub struct Pooled {
        pub features: u64 as "const PooledFeature*",
        /// By place of a key that this rank looks up: its record number.
        pub records: u64 as "const u32*",
        /// Output, by place of an id: the number of the row that its gradient is added to; 0 if there is none.
        pub rows: u64 as "u32*",
    }

    /// A copy of numbers.
    pub struct NumberCopy {
        pub from: u64 as "const void*",
        pub to: u64 as "void*",
        pub count: u64,
    }

    /// The out-of-vocabulary rows that all ranks have.
    pub struct SharedRows {
        pub tables: u64 as "const Table*",
        pub requests: u64 as "const Request*",
        /// By rank: where it has these rows.
        pub of_ranks: [u64; MAX_RANKS],
        /// Number of groups of four columns between the rows of tables.
        pub stride: u32,
        pub num_tables: u32,
    }

    /// A push of all ranks, on which they agree in a commit.
    pub struct AgreedPush {
        /// The sides of the push to the shard, by table and rank.
        pub sides: u64 as "Side*",
        /// By side: where its gradients begin among those of the rank.
        pub begins: u64 as "const u32*",
        pub num_sides: u32,
        /// Row of the rank's ticket that names the push.
        pub row: u32,
        /// Row and mark of the shard's ticket.
        pub shard_row: u32,
        pub shard_mark: f32,
    }

    /// The agreement of all ranks on a commit.
    pub struct Agreement {
        /// This rank's own verdict.
        pub resolved: u64 as "const Resolved*",
        /// By rank: where its verdicts of all ranks are, `(MAX_RANKS, RING + 1)`: weights of rows, then whether the ticket is valid.
        pub verdicts: [u64; MAX_RANKS],
        /// Tables of the shard.
        pub tables: u64 as "const Table*",
        /// Output: the shard's ticket, float32 `(64, 2)`.
        pub ticket: u64 as "float*",
        pub num_pushes: u32,
        pub pad: u32,
    }

    /// Squared norms that all ranks add.
    pub struct SharedNorms {
        /// By table and exponent: this rank's, later those of all ranks.
        pub totals: u64 as "u64*",
        pub requests: u64 as "const Request*",
        /// By rank: where it has those of all ranks, `(MAX_RANKS, tables, EXPONENTS)`.
        pub of_ranks: [u64; MAX_RANKS],
        pub num_tables: u32,
        pub pad: u32,
    }

    /// A copy of a part of a message.
    pub struct PartCopy {
        pub from: u64 as "const u64*",
        pub to: u64 as "u64*",
        /// Number of words of the message, of 8 bytes each. They hold keys, two float32 or four bfloat16.
        pub words: u64,
    }

    /// Vectors that all ranks add.
    pub struct SharedSum {
        /// By rank: the address of its vector. The sums follow it.
        pub vectors: [u64; MAX_RANKS],
        /// Number of groups of four floats.
        pub quads: u64,
    }
}
