//! Whether a table can take the rows and the optimizer states of a dump.

use super::table_entry::TableEntry;
use crate::contract::table::Table;
use crate::formula::update::Update;

/// Checks what no option of a load can change.
pub(super) fn check_shape(entry: &TableEntry, table: &dyn Table) -> Result<(), String> {
    let config = table.config();
    let name = &entry.name;
    if config.dim != entry.dim {
        let (expected, got) = (entry.dim, config.dim);
        return Err(format!(
            "`embedding_dim` of table `{name}` must be the dump's: expected {expected}, got {got}"
        ));
    }
    if config.vocabulary_size != entry.vocabulary_size {
        let show = |size: Option<u64>| size.map_or("None (a dynamic table)".into(), |n| format!("{n}"));
        let (expected, got) = (show(entry.vocabulary_size), show(config.vocabulary_size));
        return Err(format!(
            "`vocabulary_size` of table `{name}` must be the dump's: expected {expected}, got {got}"
        ));
    }
    Ok(())
}

/// Whether the dump's states are what its update says, and go on under `update`.
pub(super) fn check_states(entry: &TableEntry, update: &Update, dumped: &Update) -> Result<(), String> {
    let name = &entry.name;
    let hint = "Pass `states=False` to load the rows without optimizer states";
    dumped
        .validate()
        .map_err(|e| format!("table `{name}`: the optimizer of the dump must be valid: {e}. {hint}"))?;
    let (expected, got) = (dumped.rule.name(), update.rule.name());
    if expected != got {
        return Err(format!(
            "the optimizer of table `{name}` must be the dump's: expected {expected}, got {got}. {hint}"
        ));
    }
    let specs = update.rule.states(entry.dim);
    let got: Vec<_> = specs.iter().map(|s| (s.name, s.width)).collect();
    let expected: Vec<_> = entry.states.iter().map(|s| (s.name.as_str(), s.width)).collect();
    if expected != got {
        let show = |states: &[(&str, usize)]| {
            list(&states.iter().map(|(name, width)| format!("`{name}` of width {width}")).collect::<Vec<_>>())
        };
        let (expected, got) = (show(&expected), show(&got));
        return Err(format!(
            "the states of table `{name}` must be the dump's: expected {expected}; got {got}. {hint}"
        ));
    }
    Ok(())
}

pub(super) fn list(items: &[String]) -> String {
    if items.is_empty() { "none".into() } else { items.join(", ") }
}
