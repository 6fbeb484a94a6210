//! What travels between ranks by NCCL: one message to each other rank, with the parts of all tables. Both sides compute it from the starts
//! of the keys that the ranks ask for.

use sok_core::exchange::buckets::Owners;

use super::layout::start_of;
use crate::nccl::Transfer;

/// The keys of a table that a rank asks an owner for. They lie together.
struct AskedKeys {
    /// Place of the first one among the keys of the table that the rank asks for.
    begin: usize,
    /// Number of those that get gradients. They come first.
    active: usize,
    /// Number of all.
    all: usize,
}

/// Where the keys and rows of a table that a rank asks for are: the addresses of those with place 0, which may have no memory of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    pub keys: u64,
    pub rows: u64,
    /// Of the number of ids of each key; 0 if the table's policy does not count ids.
    pub id_counts: u64,
    /// Of the score of each key; 0 if the table's policy is not `Custom`.
    pub scores: u64,
}

/// Returns what rank `from` asks rank `to` for. `starts`: of the keys that `from` asks for.
fn asked_keys(starts: &[u32], table: usize, owners: &Owners, (from, to): (usize, usize)) -> AskedKeys {
    // Each rank has the keys of a replicated table under its own number.
    let owner = if owners.is_replicated() { from } else { to };
    let first = start_of(table, owners.world_size) / 4 + 2 * owner;
    let [begin, middle, end] = [0, 1, 2].map(|i| starts[first + i] as usize);
    AskedKeys { begin, active: middle - begin, all: end - begin }
}

/// What ranks ask each other for in a lookup.
pub(super) struct Conversation<'a> {
    /// By table.
    pub owners: &'a [Owners],
    /// By rank: the starts of the keys that it asks for.
    pub starts: &'a [Vec<u32>],
    /// By table: number of bytes of a row in a message.
    pub row_bytes: Vec<usize>,
    /// By table: whether ranks tell how many ids each key stands for.
    pub counts_ids: Vec<bool>,
    /// By table: whether ranks tell the score of each key.
    pub takes_scores: Vec<bool>,
}

/// What is exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Keys, which go to their owners.
    Keys,
    /// How many ids each key stands for, where the table's policy counts ids.
    IdCounts,
    /// The score of each key, where the table's policy is `Custom`.
    Scores,
    /// Rows, which come from there.
    Rows,
    /// Merged gradients, which go to the owners of their keys.
    Gradients,
}

/// A part of a message: what belongs to a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessagePart {
    /// The other rank.
    pub rank: usize,
    pub table: usize,
    /// Place of the first key.
    pub begin: usize,
    /// Where the part begins among the messages.
    pub offset: usize,
    /// Number of bytes.
    pub bytes: usize,
}

/// The messages of this rank to all others, or of them to this rank: one after the other, by rank.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Messages {
    /// By rank, then by table.
    pub parts: Vec<MessagePart>,
    /// Number of bytes of all.
    pub bytes: usize,
}

impl Messages {
    /// Returns where the parts are once all numbers are so many times as large.
    pub fn widened(&self, by: usize) -> Messages {
        let wide =
            |part: &MessagePart| MessagePart { offset: by * part.offset, bytes: by * part.bytes, ..*part };
        Messages { parts: self.parts.iter().map(wide).collect(), bytes: by * self.bytes }
    }

    /// Returns the transfers of messages that lie at an address.
    pub fn transfers(&self, address: u64) -> Vec<Transfer> {
        let of_rank = |parts: &[MessagePart]| Transfer {
            rank: parts[0].rank,
            address: address + parts[0].offset as u64,
            bytes: parts.iter().map(|part| part.bytes).sum(),
        };
        self.parts.chunk_by(|a, b| a.rank == b.rank).map(of_rank).collect()
    }
}

impl Conversation<'_> {
    /// Returns the messages to the ranks that this rank asks, with what belongs to its own keys.
    pub fn asks(&self, what: What) -> Messages {
        self.messages(what, |own, other| (own, other))
    }

    /// Returns the messages of the ranks that ask this rank, with what belongs to their keys.
    pub fn serves(&self, what: What) -> Messages {
        self.messages(what, |own, other| (other, own))
    }

    fn messages(&self, what: What, pair: impl Fn(usize, usize) -> (usize, usize)) -> Messages {
        let own = self.owners.first().map_or(0, |owners| owners.rank);
        let mut messages = Messages::default();
        for rank in (0..self.starts.len()).filter(|&rank| rank != own) {
            let (from, to) = pair(own, rank);
            for (table, owners) in self.owners.iter().enumerate() {
                let keys = asked_keys(&self.starts[from], table, owners, (from, to));
                let bytes = match what {
                    What::Keys => 8 * keys.all,
                    What::IdCounts => 8 * keys.all * usize::from(self.counts_ids[table]),
                    What::Scores => 8 * keys.all * usize::from(self.takes_scores[table]),
                    // Each rank has its own rows of a replicated table.
                    What::Rows if owners.is_replicated() => 0,
                    What::Rows => self.row_bytes[table] * keys.all,
                    What::Gradients => self.row_bytes[table] * keys.active,
                };
                if bytes > 0 {
                    let offset = messages.bytes;
                    messages.parts.push(MessagePart { rank, table, begin: keys.begin, offset, bytes });
                    messages.bytes += bytes;
                }
            }
        }
        messages
    }
}

#[cfg(test)]
mod tests {
    use sok_core::exchange::placement::Placement;

    use super::*;

    /// Starts of a rank for several tables, made of small numbers.
    fn starts(rank: usize, num_tables: usize, world_size: usize) -> Vec<u32> {
        let mut all = Vec::new();
        for table in 0..num_tables {
            let mut start = 0;
            for i in 0..2 * world_size {
                all.push(start);
                start += ((7 * rank + 5 * table + 3 * i) % 4) as u32;
            }
            all.push(start);
        }
        all
    }

    #[test]
    fn what_one_rank_sends_is_what_the_other_receives() {
        let world_size = 3;
        let placements = [Placement::Distributed, Placement::Replicated, Placement::Localized(2)];
        let starts: Vec<Vec<u32>> = (0..world_size).map(|rank| starts(rank, 3, world_size)).collect();
        let owners =
            |rank| placements.map(|placement| Owners { placement, is_static: true, rank, world_size });
        for what in [What::Keys, What::IdCounts, What::Scores, What::Rows, What::Gradients] {
            let of_rank = |rank| {
                let (owners, row_bytes) = (owners(rank), vec![16, 32, 48]);
                let (counts_ids, takes_scores) = (vec![true, false, true], vec![true, true, false]);
                let conversation =
                    Conversation { owners: &owners, starts: &starts, row_bytes, counts_ids, takes_scores };
                (conversation.asks(what), conversation.serves(what))
            };
            let all: Vec<_> = (0..world_size).map(of_rank).collect();
            let between = |messages: &Messages, rank: usize| {
                let parts = messages.parts.iter().filter(|part| part.rank == rank);
                parts.map(|part| (part.table, part.bytes)).collect::<Vec<_>>()
            };
            for (a, b) in (0..world_size).flat_map(|a| (0..world_size).map(move |b| (a, b))) {
                let (asked, served) = (between(&all[a].0, b), between(&all[b].1, a));
                assert_eq!(asked, served, "{what:?} of {a} and {b}");
                assert_eq!(asked.is_empty(), a == b);
            }
            for (asks, _) in &all {
                let transfers = asks.transfers(1000);
                assert_eq!(transfers.iter().map(|transfer| transfer.bytes).sum::<usize>(), asks.bytes);
                assert_eq!(transfers[0].address, 1000);
                assert_eq!(transfers.len(), world_size - 1);
            }
        }
    }

    #[test]
    fn keys_of_a_replicated_table_go_to_all_and_its_rows_to_none() {
        let starts: Vec<Vec<u32>> = vec![vec![0, 5, 7, 7, 7], vec![0, 0, 0, 2, 3]];
        let owners = [Owners { placement: Placement::Replicated, is_static: true, rank: 0, world_size: 2 }];
        let (row_bytes, counts_ids, takes_scores) = (vec![16], vec![false], vec![false]);
        let conversation =
            Conversation { owners: &owners, starts: &starts, row_bytes, counts_ids, takes_scores };
        let part = |begin, bytes| MessagePart { rank: 1, table: 0, begin, offset: 0, bytes };
        assert_eq!(conversation.asks(What::Keys).parts, [part(0, 56)]);
        assert_eq!(conversation.serves(What::Keys).parts, [part(0, 24)]);
        assert_eq!(conversation.asks(What::Rows), Messages::default());
        assert_eq!(conversation.asks(What::Gradients).parts, [part(0, 80)]);
    }
}
