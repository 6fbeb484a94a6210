//! The optimizer of a group of tables.

use crate::contract::record::RecordLayout;
use crate::contract::table::Table;
use crate::error::{Error, Result};
use crate::formula::update::Update;

/// The optimizer of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Binding {
    /// Identifies the optimizer.
    pub owner: u64,
    /// What the optimizer does to gradients and records.
    pub update: Update,
    /// Whether `commit` computes the squared norm of all gradients.
    pub needs_norm: bool,
}

impl Binding {
    /// Returns the binding of tables that were `bound` to another optimizer or to none, and whether the states of their records
    /// stay.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid update.
    pub fn after(self, bound: Option<&Binding>) -> Result<(Binding, bool)> {
        self.update.validate()?;
        let needs_norm = self.needs_norm || self.update.clipnorm.is_some();
        let keeps_states = bound.is_none_or(|b| b.owner == self.owner) || self.is_stateless();
        Ok((Binding { needs_norm, ..self }, keeps_states))
    }

    fn is_stateless(&self) -> bool {
        self.update.rule.states(1).is_empty()
    }
}

/// Checks that an optimizer may update tables whose binding is `bound`.
///
/// # Errors
/// [`Error::State`] if no optimizer or another one is bound, or if the records were replaced and have no states of this one.
pub fn check_owner<'a>(
    bound: Option<&Binding>,
    binding: &Binding,
    tables: impl Iterator<Item = &'a dyn Table> + Clone,
) -> Result<()> {
    let Some(bound) = bound else {
        return Err(Error::State("no optimizer is bound to these tables".into()));
    };
    if bound.owner != binding.owner && !(bound.is_stateless() && binding.is_stateless()) {
        let names = tables.map(|t| format!("`{}`", t.config().name)).collect::<Vec<_>>().join(", ");
        return Err(Error::State(format!(
            "the tables {names} have been bound to another optimizer since, whose states are in their records. \
             Two optimizers can only share tables if both keep no states, as SGD without momentum"
        )));
    }
    let name = binding.update.rule.name();
    let has_states = |table: &&dyn Table| {
        table.update_rule().is_some_and(|update| {
            // Every step comes here for every table, so the common case is decided without a layout.
            *update == binding.update
                || (update.rule.name() == name
                    && table.layout() == RecordLayout::new(table.config().dim, Some(&binding.update)))
        })
    };
    let mut tables = tables;
    match tables.find(|table| !has_states(table)) {
        None => Ok(()),
        Some(table) => Err(Error::State(format!(
            "the records of table `{}` have no states of {name}, the optimizer that is bound to it: they were replaced since",
            table.config().name
        ))),
    }
}
