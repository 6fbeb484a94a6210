//! The tables of a layer and the four calls of a training step, wherever the tables are.
//!
//! A bridge calls these with the tensors of its framework. `docs/architecture.md` follows one training step.

use std::any::Any;

use crate::contract::batch::Combiner;
use crate::contract::binding::{Binding, check_owner};
use crate::contract::general::{Gather, Scatter};
use crate::contract::gradients::Keep;
use crate::contract::profile::Profile;
use crate::contract::table::{Insertion, Table};
use crate::contract::tensor::{Memory, StreamHandle, Tensor, TensorMut};
use crate::error::{Error, Result};
use crate::exchange::buckets::Owners;
use crate::key::Key;

/// The tensors of one feature of a lookup.
#[derive(Clone, Copy)]
pub struct FeatureTensors<'a> {
    /// Name, for messages.
    pub name: &'a str,
    /// Index of its table in the group.
    pub table: usize,
    /// The ids, or the low words of 64-bit ids if `high` has the high words.
    pub ids: &'a Tensor,
    /// The high words of 64-bit ids, int32. `None`: `ids` has whole ids.
    pub high: Option<&'a Tensor>,
    /// Which ids are combined.
    pub bags: BagTensors<'a>,
    /// The weights, float32, one for each id. `None`: all weights are 1.
    pub weights: Option<&'a Tensor>,
    /// The scores, int32 or int64, one for each id, for a table with the policy `Custom`. `None`: scores stay as they are.
    pub scores: Option<&'a Tensor>,
    /// How they are combined.
    pub combiner: Combiner,
    /// The key that means "no id", if there is one.
    pub padding_key: Option<Key>,
}

/// Which ids are combined to one output row.
#[derive(Clone, Copy)]
pub enum BagTensors<'a> {
    /// No ids are combined: one row for each id.
    Each,
    /// All bags have the same number of ids.
    Fixed {
        /// Number of bags.
        num_bags: usize,
        /// Ids in each.
        hotness: usize,
    },
    /// Row splits, int32 or int64 `(bags + 1,)`.
    Ragged(&'a Tensor),
}

/// The gradients of a lookup's outputs.
pub struct GradientTensors<'a> {
    /// float32 `(bags, dim)`, by feature.
    pub rows: Vec<&'a Tensor>,
    /// If given, the gradients stay where they are until they are applied. If not, they are merged or copied at once.
    pub keep: Option<Keep>,
    /// Whether a gradient that is not finite makes the ticket NaN, which a loss scale looks for.
    pub check_finite: bool,
}

/// The output for the gradient of a feature's weights.
pub struct WeightGradient {
    /// Index of the feature in the call.
    pub feature: usize,
    /// Receives the gradient, float32 `(ids,)`.
    pub to: TensorMut,
}

/// A commit of all groups of an optimizer.
pub struct Commit<'a> {
    /// The binding of each group.
    pub bindings: &'a [Binding],
    /// Whether the optimizer accumulates the gradients of several steps.
    pub accumulates: bool,
    /// float32 `(1,)`. If it is 0, the gradients are only accumulated.
    pub is_update: &'a Tensor,
    /// The ticket of each group, float32 `(64, 2)`.
    pub tickets: Vec<&'a Tensor>,
    /// Receives the squared norm of all gradients to apply, float32 `()`. It is 0 if no binding needs it.
    pub norm: TensorMut,
    /// The stream on which the tensors are ready.
    pub stream: StreamHandle,
}

/// An apply of all groups of an optimizer.
pub struct Apply<'a> {
    /// The binding of each group.
    pub bindings: &'a [Binding],
    /// Whether the optimizer accumulates the gradients of several steps.
    pub accumulates: bool,
    /// float32 `(rows, 4)`: learning rate, step (1-based), is_update, factor. Row 0 is that of the model's optimizer; tables' own optimizers have
    /// theirs as [`OwnUpdate`](super::binding::OwnUpdate) says. They have the same is_update.
    pub scalars: &'a Tensor,
    /// The trigger of each group and the output for its new value, float32 `(64, 2)`. Empty if the new values have been written.
    pub triggers: Vec<(&'a Tensor, TensorMut)>,
    /// The stream on which the tensors are ready.
    pub stream: StreamHandle,
}

/// A group on the host or on a GPU.
pub type AnyGroup = dyn Group;

/// The tables of a layer, which are looked up together.
pub trait Group: Any + Send {
    /// Returns the memory of the tables, in which tensors must be too.
    fn memory(&self) -> Memory;

    /// Number of tables.
    fn num_tables(&self) -> usize;

    /// Takes over what the device has reported of the tables' rows. Until then, tables may not know which rows have expired in the last
    /// commit. Waits for that commit.
    fn settle_tables(&mut self) {}

    /// Returns the table with this index.
    fn table(&self, number: usize) -> &dyn Table;

    /// Returns the table with this index for changes.
    fn table_mut(&mut self, number: usize) -> &mut dyn Table;

    /// Returns all tables for changes, in order.
    fn tables_mut(&mut self) -> Vec<&mut dyn Table>;

    /// Returns which ranks own the keys of the table with this index. `None`: this process has the whole table.
    fn owners(&self, _number: usize) -> Option<Owners> {
        None
    }

    /// Looks up the rows of all features of a layer's call.
    ///
    /// `insertion`: when keys without a row get one. `save`: whether to keep what `push` needs. `number`: int32 `(2,)`, receives
    /// the low and the high word of the lookup's number, or 0 without `save`. `rows`: float32 `(bags, dim)` for each feature; every
    /// element is written.
    ///
    /// # Errors
    /// [`Error::Argument`] for lengths that do not agree, [`Error::OutOfVocabulary`], [`Error::TableFull`], [`Error::Memory`].
    /// Nothing has changed then. A device may report an error at a later call.
    fn lookup(
        &mut self,
        features: &[FeatureTensors<'_>],
        insertion: Insertion,
        save: bool,
        number: TensorMut,
        rows: Vec<TensorMut>,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Tells the ids of a later training lookup, so that what needs no rows can be done ahead of it. No result depends on it. `keep`: what
    /// keeps the tensors readable until it is dropped. `stream`: on which they are ready; `None` if they are.
    ///
    /// # Errors
    /// [`Error::Device`]. Nothing has changed then.
    fn prefetch(
        &mut self,
        _features: &[FeatureTensors<'_>],
        _keep: Keep,
        _stream: Option<StreamHandle>,
    ) -> Result<()> {
        Ok(())
    }

    /// Takes the gradients of the outputs of the lookup with this `number`. `ticket`: float32 `(64, 2)`, receives the ticket.
    ///
    /// # Errors
    /// [`Error::UnwrappedOptimizer`] at the second push to a group that no optimizer is bound to; [`Error::Ticket`] if the lookup no
    /// longer exists, or kept nothing; [`Error::Argument`] for other lengths. Nothing has changed then.
    fn push(
        &mut self,
        number: &Tensor,
        gradients: GradientTensors<'_>,
        weight_gradients: Vec<WeightGradient>,
        ticket: TensorMut,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Reads from tickets which pushes count, and inserts their absent keys. `others`: the other groups of the optimizer.
    ///
    /// # Errors
    /// [`Error::State`] for an optimizer that may not update the tables, [`Error::Ticket`], [`Error::TableFull`]. Nothing has changed
    /// then.
    fn commit(&mut self, others: Vec<&mut AnyGroup>, commit: Commit<'_>) -> Result<()>;

    /// Updates the records of the committed pushes, or only accumulates their gradients. `others`: the other groups of the optimizer.
    ///
    /// # Errors
    /// As [`check_owner`](Group::check_owner), for any of the groups. Nothing has changed then, and the committed pushes are dropped.
    fn apply(&mut self, others: Vec<&mut AnyGroup>, apply: Apply<'_>) -> Result<()>;

    /// Writes a piece of the rows that an optimizer without a formula is to change. Changes no row. `others`: the other groups of the
    /// optimizer.
    ///
    /// # Errors
    /// [`Error::State`] for an optimizer with a formula, or one that may not update the tables; [`Error::Argument`] for other lengths;
    /// [`Error::Memory`], [`Error::Device`].
    fn gather(&mut self, others: Vec<&mut AnyGroup>, gather: Gather<'_>) -> Result<()>;

    /// Takes the new values of a piece. They are in the records after the apply; a device writes them at once. `others`: the other groups of the optimizer.
    ///
    /// # Errors
    /// As `gather`.
    fn scatter(&mut self, others: Vec<&mut AnyGroup>, scatter: Scatter<'_>) -> Result<()>;

    /// Drops committed pushes, because their step has failed.
    fn drop_committed(&mut self);

    /// Binds an optimizer. The records get its states. States of another optimizer are reset. Loaded states are kept if no
    /// optimizer was bound before, or if the variables of the optimizer were loaded too and no optimizer has updated the table since the load.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid update, [`Error::Memory`].
    fn bind(&mut self, binding: Binding) -> Result<()> {
        let (binding, keeps_states) = binding.after(self.binding())?;
        for number in 0..self.num_tables() {
            let (optimizer, num_others) = (self.table(number).config().optimizer, binding.others.len());
            if optimizer > num_others {
                return Err(Error::argument(format!(
                    "table `{}` is updated by optimizer {optimizer}, but the group has {num_others} beside the model's",
                    self.table(number).config().name
                )));
            }
        }
        for table in self.tables_mut() {
            let keeps_states = keeps_states || (binding.was_restored && table.has_loaded_states());
            table.set_update_rule(Some(*binding.update_of(table.config())), keeps_states)?;
        }
        self.set_binding(binding)
    }

    /// Stores the binding, and counts pushes without an optimizer anew. Only [`bind`](Group::bind) calls this, after all tables have their
    /// states.
    ///
    /// # Errors
    /// [`Error::Memory`], and [`Error::Argument`] if the device does not have the update mode.
    fn set_binding(&mut self, binding: Binding) -> Result<()>;

    /// Returns the optimizer that is bound, if there is one.
    fn binding(&self) -> Option<&Binding>;

    /// Returns the number of pushes that no ticket has named yet. Without `wait`, a device may still count pushes that its last
    /// commit took.
    ///
    /// # Errors
    /// The error that a device found in the last commit.
    fn pending_pushes(&mut self, wait: bool) -> Result<usize>;

    /// Returns the number of bytes that steps keep for later steps.
    fn step_bytes(&self) -> usize;

    /// Returns the tables that have refused keys since the last call and whose check mode is to warn: name and number of refused
    /// keys.
    fn take_refused(&mut self) -> Vec<(String, u64)>;

    /// Starts to measure the parts of steps, or stops. Steps are slower while they are measured.
    fn measure(&mut self, is_on: bool);

    /// Whether the parts of steps are measured.
    fn is_measured(&self) -> bool;

    /// Returns the times of the parts since `measure` or the last call, zeros if nothing is measured. Waits for a device.
    ///
    /// # Errors
    /// [`Error::Device`] if a launch has failed.
    fn take_profile(&mut self) -> Result<Profile>;

    /// Waits for a device. Returns the error that it found after its calls had returned, if there was one.
    fn take_failure(&mut self) -> Option<Error> {
        None
    }

    /// Returns the names of the tables, for messages.
    fn names(&self) -> String {
        let names = (0..self.num_tables()).map(|number| format!("`{}`", self.table(number).config().name));
        names.collect::<Vec<_>>().join(", ")
    }

    /// Checks that this optimizer may update the tables now. Changes nothing.
    ///
    /// # Errors
    /// [`Error::State`] if no optimizer or another one is bound, or if the records lost their states.
    fn check_owner(&self, binding: &Binding) -> Result<()> {
        check_owner(self.binding(), binding, (0..self.num_tables()).map(|number| self.table(number)))
    }

    /// Binds another optimizer for this step, if neither it nor the bound one has states.
    ///
    /// # Errors
    /// As `check_owner`. Nothing has changed then.
    fn take_over(&mut self, binding: &Binding) -> Result<()> {
        self.check_owner(binding)?;
        let is_bound = self.binding().is_some_and(|bound| bound.owner == binding.owner);
        if is_bound { Ok(()) } else { self.bind(binding.clone()) }
    }
}

/// Returns all groups of an optimizer, as the type of the first one. A commit or an apply uses them together.
///
/// # Errors
/// [`Error::Device`] if they are not of one kind.
pub fn together<'a, G: Group>(first: &'a mut G, others: Vec<&'a mut AnyGroup>) -> Result<Vec<&'a mut G>> {
    let mut groups = vec![first];
    for other in others {
        let what = (groups[0] as &AnyGroup, &*other);
        let differs = format!(
            "an optimizer updates tables of the host or of one GPU. Received: the tables {} and {}. Give the layers one `storage`",
            what.0.names(),
            what.1.names()
        );
        let other: &mut dyn Any = other;
        groups.push(other.downcast_mut().ok_or(Error::Device(differs))?);
    }
    Ok(groups)
}

/// Returns the part that `part` returns of each group of an optimizer. The part of the first group comes by itself.
///
/// # Errors
/// As [`together`].
pub fn parts_together<'a, G: Group, P: Group>(
    first: &'a mut G,
    others: Vec<&'a mut AnyGroup>,
    part: impl Fn(&'a mut G) -> &'a mut P,
) -> Result<(&'a mut P, Vec<&'a mut AnyGroup>)> {
    let mut parts = together(first, others)?.into_iter().map(part);
    let first = parts.next().expect("the first group is among them");
    Ok((first, parts.map(|part| part as &mut AnyGroup).collect()))
}

/// Checks that a tensor is in the same memory as the tables of a group.
///
/// # Errors
/// [`Error::Device`] if it is not.
pub fn check_memory(group: &AnyGroup, tensor: Memory) -> Result<()> {
    match (group.memory(), tensor) {
        (Memory::Device, Memory::Host) => Err(Error::Device(format!(
            "the tables {} are on a GPU, but the tensors of this call are on the host. Run the model on the GPU, or use \
             `storage=\"host\"`",
            group.names()
        ))),
        (Memory::Host, Memory::Device) => {
            Err(Error::Device(format!("the tables {} are on the host, not on the GPU", group.names())))
        }
        _ => Ok(()),
    }
}

/// Message for a lookup without `save`. When a `tf.function` is traced, it is not known whether its results will be differentiated.
const KEPT_NOTHING: &str = "a gradient is asked of a lookup that kept nothing for it: its `tf.function` was traced where no gradient \
     was recorded. Call the layer with `training=True`, or open the `tf.GradientTape` inside the function";

/// Reads the number of a lookup, which the lookup wrote to host memory as two int32.
///
/// # Errors
/// [`Error::Ticket`] for a lookup that kept nothing; [`Error::Argument`] and [`Error::Device`] for any other tensor.
pub fn lookup_number(group: &AnyGroup, number: &Tensor) -> Result<u64> {
    let &[low, high] = number.slice::<i32>()? else {
        return Err(Error::argument("a lookup's number is two int32"));
    };
    match u64::from(low as u32) | u64::from(high as u32) << 32 {
        0 => Err(Error::Ticket { tables: group.names(), what: KEPT_NOTHING.into() }),
        number => Ok(number),
    }
}

/// Writes the number of a lookup to host memory, as two int32.
///
/// # Errors
/// As [`TensorMut::slice_mut`].
pub fn write_lookup_number(number: u64, to: &mut TensorMut) -> Result<()> {
    to.slice_mut::<i32>()?.copy_from_slice(&[number as i32, (number >> 32) as i32]);
    Ok(())
}

/// Writes the new value of a trigger to host memory. The next lookup depends on it, so it comes after the update. The value itself
/// has no meaning.
///
/// # Errors
/// As [`TensorMut::slice_mut`].
pub fn write_trigger(trigger: &Tensor, to: &mut TensorMut) -> Result<()> {
    let new = to.slice_mut::<f32>()?;
    new.copy_from_slice(trigger.slice::<f32>()?);
    new[0] += 1.0;
    Ok(())
}
