//! One optimizer step of a table, outside a training step.

#![allow(unsafe_code)]

use sok_core::contract::batch::Combiner;
use sok_core::contract::ticket::RING;
use sok_core::error::Result;
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::row_type::RowType;

use super::{Bags, By, Feature, Ids, KeyType, LookupOptions, RowSource, Workspace};
use crate::abi::{PREPARED_WORDS, Preparation};
use crate::device::{Stream, launch};
use crate::gpu_table::GpuTable;
use crate::kernels::CONTROL;
use crate::memory::Buffer;
use crate::rule;

/// Merges the gradients of these ids and updates the records of their keys. Ids without a record are ignored. Waits for the device.
///
/// # Errors
/// `Error::Argument` for too many ids. `Error::Device` without enough memory, or if a kernel cannot be compiled or has failed.
pub fn update_once(
    table: &mut GpuTable,
    update: &Update,
    ids: &Buffer<u64>,
    gradients: &Buffer<f32>,
    scalars: &UpdateScalars,
) -> Result<()> {
    let device = table.device.clone();
    let context = &device.context;
    let stream = Stream::DEFAULT;
    let tables = std::slice::from_mut(table);
    tables[0].has_moved = true;
    let mut workspace = Workspace::new(&device, tables)?;
    let rows = Buffer::<f32>::uninit(context, gradients.len())?;
    let feature = Feature {
        name: "keys",
        table: 0,
        ids: Ids { address: ids.address(), high: 0, key_type: KeyType::Wide, len: ids.len() },
        bags: Bags::Each,
        combiner: Combiner::Sum,
        weights: None,
        padding_key: None,
        is_silent: false,
        at_owner: false,
        id_counts: 0,
        scores: None,
        rows: rows.address(),
        array_type: RowType::Float32,
    };
    workspace.enter(stream)?;
    let options =
        LookupOptions { inserts: &[false], absent: &[], save: true, number: None, rows: RowSource::Records };
    if let Some(saved) = workspace.lookup(tables, &[feature], options, stream)? {
        workspace.enter(stream)?;
        let sides = workspace.sides(tables, &saved, &[gradients.address()], 0);
        workspace.deliver_sides(&saved, &sides, stream)?;
        let numbers = [scalars.learning_rate, scalars.step as f32, 1.0, scalars.factor];
        let numbers = Buffer::from_slice(context, &numbers)?;
        let prepared = Buffer::<u32>::new(context, PREPARED_WORDS)?;
        let preparation = Preparation {
            scalars: numbers.address(),
            prepared: prepared.address(),
            conditioning: rule::conditioning(update),
            formula: rule::scalars(&update.rule),
            row: RING as u32,
            ..Preparation::default()
        };
        let prepare = device.kernel(&CONTROL, &format!("prepare<1, {}>", rule::type_name(&update.rule)))?;
        // SAFETY: The argument has the type of the kernel's parameter. The buffers above live until the wait below.
        unsafe { launch!(prepare, stream, 1, 2 * RING as u32, preparation) }?;
        workspace.note_updated(&saved, prepared.address(), stream)?;
        let optimizer = tables[0].config.optimizer;
        let by = By { optimizer, update, prepared: prepared.address(), factors: 0 };
        workspace.update(&saved, &by, stream)?;
        device.synchronize()?;
    }
    // The launches have counted the ids as if a step had looked them up.
    tables[0].has_moved = true;
    tables[0].forget_counts()
}
