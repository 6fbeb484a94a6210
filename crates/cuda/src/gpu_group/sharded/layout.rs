//! Where things are in the windows of ranks. A rank computes from the numbers of ids of another one where these are in its windows.

use sok_core::host::sharded::counts_ids;

use super::asked::TableRequest;
use crate::abi::quads;
use crate::gpu_table::GpuTable;
use crate::step::{KeysTo, Saved};

/// Parts of windows begin at multiples of this number of bytes.
const ALIGNMENT: usize = 256;

/// The parts of a lookup's window, in bytes from its start.
pub(super) struct LookupLayout {
    /// By table: where its keys are.
    pub keys: Vec<usize>,
    /// By table: where its rows are.
    pub rows: Vec<usize>,
    /// By table: what its owner needs to pool its bags. Places are unused for tables whose owners give rows.
    pub pooled: Vec<PooledPlaces>,
    /// By table whose policy counts ids: where the number of ids of each of its keys is.
    pub id_counts: Vec<Option<usize>>,
    /// By table with the policy `Custom`: where the score of each of its keys is.
    pub scores: Vec<Option<usize>>,
    /// Number of bytes.
    pub bytes: usize,
}

/// Places of what the owner of a table pools, in bytes from the start of a lookup's window.
#[derive(Clone, Debug, Default)]
pub(super) struct PooledPlaces {
    /// Of the ids, and of the numbers of their rows.
    pub ids: usize,
    pub numbers: usize,
    /// By feature: of the row splits and of the pooled rows.
    pub features: Vec<(usize, usize)>,
}

/// Addresses in the window of a rank, see [`PooledPlaces`].
pub(super) struct PooledAddresses {
    pub ids: u64,
    pub numbers: u64,
    pub features: Vec<(u64, u64)>,
}

impl PooledAddresses {
    pub fn of(places: &PooledPlaces, window: u64) -> PooledAddresses {
        let of_feature = |&(splits, rows): &(usize, usize)| (window + splits as u64, window + rows as u64);
        PooledAddresses {
            ids: window + places.ids as u64,
            numbers: window + places.numbers as u64,
            features: places.features.iter().map(of_feature).collect(),
        }
    }
}

/// The starts of the keys of each owner, `(tables, 2 * ranks + 1)`, are at the beginning of a lookup's window.
pub(super) fn start_of(table: usize, world_size: usize) -> usize {
    4 * table * (2 * world_size + 1)
}

impl LookupLayout {
    /// The layout for what a rank asks for, by table.
    pub fn new(tables: &[GpuTable], requests: &[TableRequest], world_size: usize) -> LookupLayout {
        let mut bytes = 0;
        let sizes = requests.iter().map(|request| (request.num_ids, request.is_pooled()));
        let (keys, rows) = take_keys_and_rows(&mut bytes, tables, sizes, world_size);
        let place = |(table, request): (&GpuTable, &TableRequest)| {
            if !request.is_pooled() {
                return PooledPlaces::default();
            }
            let (ids, numbers) =
                (take(&mut bytes, 8 * request.num_ids), take(&mut bytes, 4 * request.num_ids));
            let features = request.bags.iter().map(|bags| {
                let splits = take(&mut bytes, 4 * bags.num_splits());
                (splits, take(&mut bytes, 4 * table.config.dim * bags.num_bags))
            });
            let features = features.collect();
            PooledPlaces { ids, numbers, features }
        };
        let pooled = tables.iter().zip(requests).map(place).collect();
        let counts = |(table, request): (&GpuTable, &TableRequest)| {
            counts_ids(&table.config).then(|| take(&mut bytes, 8 * request.num_ids))
        };
        let id_counts = tables.iter().zip(requests).map(counts).collect();
        let scores = |(table, request): (&GpuTable, &TableRequest)| {
            table.config.takes_scores().then(|| take(&mut bytes, 8 * request.num_ids))
        };
        let scores = tables.iter().zip(requests).map(scores).collect();
        LookupLayout { keys, rows, pooled, id_counts, scores, bytes }
    }

    /// In a window at an address: by table, where its keys are written to, and the address of its rows. `distinct`: address of a number
    /// for each table, see [`KeysTo`].
    pub fn addresses(&self, window: u64, distinct: u64, world_size: usize) -> (Vec<KeysTo>, Vec<u64>) {
        let to = |(table, (&keys, pooled)): (usize, (&usize, &PooledPlaces))| {
            let of_owner = |place: usize| if pooled.features.is_empty() { 0 } else { window + place as u64 };
            KeysTo {
                keys: window + keys as u64,
                starts: window + start_of(table, world_size) as u64,
                ids: of_owner(pooled.ids),
                numbers: of_owner(pooled.numbers),
                id_counts: self.id_counts[table].map_or(0, |place| window + place as u64),
                scores: self.scores[table].map_or(0, |place| window + place as u64),
                distinct: distinct + 8 * table as u64,
            }
        };
        let rows = self.rows.iter().map(|&rows| window + rows as u64).collect();
        (self.keys.iter().zip(&self.pooled).enumerate().map(to).collect(), rows)
    }
}

/// Number of bytes of a row in a window: whole groups of four columns.
pub(super) fn row_bytes(table: &GpuTable) -> usize {
    16 * quads(table.config.dim)
}

/// Appends a part of `size` bytes to a window of `bytes` bytes. Returns where the part begins.
fn take(bytes: &mut usize, size: usize) -> usize {
    let begin = *bytes;
    *bytes += size.next_multiple_of(ALIGNMENT);
    begin
}

/// Appends the starts of keys, keys and rows. `sizes`: by table, its number of ids, and whether its bags are pooled at the owner.
fn take_keys_and_rows(
    bytes: &mut usize,
    tables: &[GpuTable],
    sizes: impl Iterator<Item = (usize, bool)> + Clone,
    world_size: usize,
) -> (Vec<usize>, Vec<usize>) {
    take(bytes, start_of(tables.len(), world_size));
    let keys = sizes.clone().map(|(ids, _)| take(bytes, 8 * ids)).collect();
    (keys, take_rows(bytes, tables, sizes))
}

/// Appends a row for each id of each table whose bags are not pooled at the owner. Returns where those of each table begin.
fn take_rows(
    bytes: &mut usize,
    tables: &[GpuTable],
    sizes: impl Iterator<Item = (usize, bool)>,
) -> Vec<usize> {
    let rows = |(table, (ids, is_pooled)): (&GpuTable, (usize, bool))| {
        take(bytes, if is_pooled { 0 } else { row_bytes(table) * ids })
    };
    tables.iter().zip(sizes).map(rows).collect()
}

/// The parts of a push's window, in bytes from its start.
pub(in crate::gpu_group) struct GradientLayout {
    /// By table: where its merged gradients are.
    pub merged: Vec<usize>,
    /// By table, and by feature whose bags its owner pools: where their gradients are.
    pub bags: Vec<Vec<usize>>,
    /// Number of bytes.
    pub bytes: usize,
}

impl GradientLayout {
    /// `sizes`: by table, its number of ids, and the number of bags of each feature that its owner pools.
    pub fn new(tables: &[GpuTable], sizes: &[(usize, Vec<usize>)]) -> GradientLayout {
        let mut bytes = 0;
        let of_rows = sizes.iter().map(|(ids, bags)| (*ids, !bags.is_empty()));
        let merged = take_rows(&mut bytes, tables, of_rows);
        let of_table = |(table, (_, bags)): (&GpuTable, &(usize, Vec<usize>))| {
            bags.iter().map(|bags| take(&mut bytes, 4 * table.config.dim * bags)).collect()
        };
        let bags = tables.iter().zip(sizes).map(of_table).collect();
        GradientLayout { merged, bags, bytes }
    }

    /// The layout for the gradients of a lookup.
    pub fn of(tables: &[GpuTable], saved: &Saved) -> GradientLayout {
        let mut sizes = vec![(0, Vec::new()); tables.len()];
        for feature in &saved.features {
            let (ids, bags) = &mut sizes[feature.table];
            *ids += feature.num_ids;
            bags.extend(feature.at_owner.then_some(feature.num_bags));
        }
        GradientLayout::new(tables, &sizes)
    }
}

/// By table: where the rows of a lookup are in its window.
pub(in crate::gpu_group) fn row_places(tables: &[GpuTable], saved: &Saved, world_size: usize) -> Vec<usize> {
    let mut sizes = vec![(0, false); tables.len()];
    for feature in &saved.features {
        sizes[feature.table].0 += feature.num_ids;
        sizes[feature.table].1 |= feature.at_owner;
    }
    take_keys_and_rows(&mut 0, tables, sizes.into_iter(), world_size).1
}
