//! Where things are in the windows of ranks. A rank computes from the numbers of ids of another one where these are in its windows.

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
    /// Number of bytes.
    pub bytes: usize,
}

/// The starts of the keys of each owner, `(tables, 2 * ranks + 1)`, are at the beginning of a lookup's window.
pub(super) fn start_of(table: usize, world_size: usize) -> usize {
    4 * table * (2 * world_size + 1)
}

impl LookupLayout {
    /// The layout for these numbers of ids of each table.
    pub fn new(tables: &[GpuTable], num_ids: &[usize], world_size: usize) -> LookupLayout {
        let mut bytes = 0;
        take(&mut bytes, start_of(tables.len(), world_size));
        let keys = num_ids.iter().map(|ids| take(&mut bytes, 8 * ids)).collect();
        let rows = take_rows(&mut bytes, tables, num_ids);
        LookupLayout { keys, rows, bytes }
    }

    /// In a window at an address: by table, where its keys are written to, and the address of its rows.
    pub fn addresses(&self, window: u64, world_size: usize) -> (Vec<KeysTo>, Vec<u64>) {
        let to = |(table, &keys): (usize, &usize)| KeysTo {
            keys: window + keys as u64,
            starts: window + start_of(table, world_size) as u64,
        };
        let rows = self.rows.iter().map(|&rows| window + rows as u64).collect();
        (self.keys.iter().enumerate().map(to).collect(), rows)
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

/// Appends a row for each id of each table. Returns where those of each table begin.
fn take_rows(bytes: &mut usize, tables: &[GpuTable], num_ids: &[usize]) -> Vec<usize> {
    tables.iter().zip(num_ids).map(|(table, ids)| take(bytes, row_bytes(table) * ids)).collect()
}

/// By table: where its merged gradients are in the window of a push, and the number of bytes of the window.
pub(super) fn gradient_layout(tables: &[GpuTable], num_ids: &[usize]) -> (Vec<usize>, usize) {
    let mut bytes = 0;
    (take_rows(&mut bytes, tables, num_ids), bytes)
}

/// By table: the number of ids of a lookup.
fn num_ids_of(tables: &[GpuTable], saved: &Saved) -> Vec<usize> {
    let mut num_ids = vec![0; tables.len()];
    saved.features.iter().for_each(|feature| num_ids[feature.table] += feature.num_ids);
    num_ids
}

/// By table: where the merged gradients of a lookup are in the window of a push.
pub(in crate::gpu_group) fn gradient_places(tables: &[GpuTable], saved: &Saved) -> Vec<usize> {
    gradient_layout(tables, &num_ids_of(tables, saved)).0
}

/// By table: where the rows of a lookup are in its window.
pub(in crate::gpu_group) fn row_places(tables: &[GpuTable], saved: &Saved, world_size: usize) -> Vec<usize> {
    LookupLayout::new(tables, &num_ids_of(tables, saved), world_size).rows
}

/// Number of bytes of the merged gradients of a lookup.
pub(in crate::gpu_group) fn gradient_bytes(tables: &[GpuTable], saved: &Saved) -> usize {
    gradient_layout(tables, &num_ids_of(tables, saved)).1
}
