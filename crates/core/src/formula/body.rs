//! A formula for both devices from one text.
//!
//! The bodies in `step!` are Rust and CUDA C++ at once. They have `let`, `let mut`, `=`, `+=`, `-=`, `+ - * /`, parentheses, float
//! literals with a point, `if (FLAG) { } else { }`, `if (a > b && c > d) { }`, and the functions of `math.rs` that `kernels/math.cuh` has under the same names:
//! `absolute`, `clip`, `larger`, `nadam_product`, `power_of_step`, `raise`, `sign`, `sqrt`.

/// Defines the step of a formula, and `SOURCE`, its text for CUDA.
///
/// - `scalars`: float32 numbers that the bodies read, [`MAX_SCALARS`](super::step::MAX_SCALARS) at most. One is the `learning_rate`.
/// - `states`: floats of each column, `if` a flag holds. The first state may start `=` a scalar; the others start at 0.
/// - `row_state`: a float of the whole row, which `reduce` updates from the mean of the squares of its gradient. What `reduce` computes
///   under the name behind the arrow, `step` may read.
/// - `prepare`: computes scalars from others and the 1-based count of updates, once for each step of training.
/// - `direct`: makes a direction of a column's gradient and updates its states. `ratio` then computes a number of the whole row from the sums
///   of the squares of its values and of its directions. `step` takes the direction as its gradient, and may read the ratio.
/// - `step`: computes the new `x` of a column, and its states, from its gradient.
macro_rules! step {
    (
        $(#[doc = $doc:literal])*
        $name:ident $(<$($flag:ident),+>)? {
            scalars: [$($scalar:ident),+ $(,)?],
            states: [$($state:ident $(= $initial:ident)? $(if $present:ident)?),* $(,)?],
            $(row_state: $row_state:ident = $row_initial:ident,)?
            $(prepare($count:ident) { $($prepare:tt)* })?
            $(reduce($mean_of_squares:ident) -> $reduced:ident { $($reduce:tt)* })?
            $(direct($given:ident) -> $direction:ident { $($direct:tt)* })?
            $(ratio($of_row:ident, $of_direction:ident) -> $ratio:ident { $($compare:tt)* })?
            step($x:ident, $gradient:ident) { $($body:tt)* }
        }
    ) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Default)]
        struct $name $(<$(const $flag: bool),+>)? {
            $($scalar: f32,)+
        }

        #[allow(unused_assignments, unused_imports, unused_mut, unused_parens, unused_variables)]
        impl $(<$(const $flag: bool),+>)? $crate::formula::step::Step for $name $(<$($flag),+>)? {
            const STATES: usize = 0 $(+ body!(@is_present $($present)?) as usize)*;
            const REDUCES: bool = body!(@has $($row_state)?);
            const DIRECTS: bool = body!(@has $($direction)?);

            fn device_type() -> String {
                $crate::formula::body::device_type(stringify!($name), &[$($($flag),+)?])
            }

            fn scalars(&self) -> [f32; $crate::formula::step::MAX_SCALARS] {
                let given = [$(self.$scalar),+];
                std::array::from_fn(|i| given.get(i).copied().unwrap_or(0.0))
            }

            fn states(&self, dim: usize) -> Vec<$crate::formula::step::StateSpec> {
                let spec = |name, width, initial| $crate::formula::step::StateSpec { name, width, initial };
                let states: Vec<Option<$crate::formula::step::StateSpec>> = vec![
                    $(body!(@is_present $($present)?).then(|| spec(stringify!($state), dim, 0.0 $(+ self.$initial)?)),)*
                    $(Some(spec(stringify!($row_state), 1, self.$row_initial)),)?
                ];
                states.into_iter().flatten().collect()
            }

            fn prepare(&mut self, learning_rate: f32, count: u64) {
                use $crate::math::{absolute, clip, larger, nadam_product, power_of_step, raise, sign, sqrt};
                self.learning_rate = learning_rate;
                let Self { $(mut $scalar),+ } = *self;
                $(
                    let $count = count;
                    $($prepare)*
                )?
                *self = Self { $($scalar),+ };
            }

            #[inline(always)]
            fn reduce(&self, state: &mut f32, mean_of_squares: f32) -> f32 {
                use $crate::math::{absolute, clip, larger, nadam_product, power_of_step, raise, sign, sqrt};
                let Self { $($scalar),+ } = *self;
                let mut result = 0.0;
                $(
                    let $mean_of_squares = mean_of_squares;
                    let mut $row_state = *state;
                    $($reduce)*
                    *state = $row_state;
                    result = $reduced;
                )?
                result
            }

            #[inline(always)]
            fn direct(&self, states: &mut [f32; $crate::formula::step::MAX_STATES], gradient: f32) -> f32 {
                use $crate::math::{absolute, clip, larger, nadam_product, power_of_step, raise, sign, sqrt};
                let Self { $($scalar),+ } = *self;
                let mut place = 0;
                $(
                    let mut $state = 0.0;
                    if body!(@is_present $($present)?) {
                        $state = states[place];
                        place += 1;
                    }
                )*
                let mut result = gradient;
                $(
                    let $given = gradient;
                    $($direct)*
                    result = $direction;
                )?
                let mut place = 0;
                $(if body!(@is_present $($present)?) {
                    states[place] = $state;
                    place += 1;
                })*
                result
            }

            #[inline(always)]
            fn ratio(&self, of_row: f32, of_direction: f32) -> f32 {
                use $crate::math::{absolute, clip, larger, nadam_product, power_of_step, raise, sign, sqrt};
                let Self { $($scalar),+ } = *self;
                let mut result = 1.0;
                $(
                    let ($of_row, $of_direction) = (of_row, of_direction);
                    $($compare)*
                    result = $ratio;
                )?
                result
            }

            #[inline(always)]
            fn step(
                &self,
                x: f32,
                states: &mut [f32; $crate::formula::step::MAX_STATES],
                gradient: f32,
                reduced: f32,
            ) -> f32 {
                use $crate::math::{absolute, clip, larger, nadam_product, power_of_step, raise, sign, sqrt};
                let Self { $($scalar),+ } = *self;
                let (mut $x, $gradient) = (x, gradient);
                $(let $reduced = reduced;)?
                $(let $ratio = reduced;)?
                let mut place = 0;
                $(
                    let mut $state = 0.0;
                    if body!(@is_present $($present)?) {
                        $state = states[place];
                        place += 1;
                    }
                )*
                $($body)*
                let mut place = 0;
                $(if body!(@is_present $($present)?) {
                    states[place] = $state;
                    place += 1;
                })*
                $x
            }
        }

        pub(super) const SOURCE: $crate::formula::body::Source = $crate::formula::body::Source {
            name: stringify!($name),
            flags: &[$($(stringify!($flag)),+)?],
            scalars: &[$(stringify!($scalar)),+],
            states: &[$((stringify!($state), body!(@presence $($present)?))),*],
            prepare: body!(@text $(stringify!($count), stringify!($($prepare)*))?),
            reduce: body!(@reduction $(
                stringify!($row_state), stringify!($mean_of_squares), stringify!($reduced), stringify!($($reduce)*)
            )?),
            direct: body!(@text $(stringify!($given), stringify!($direction), stringify!($($direct)*))?),
            ratio: body!(@reduction $(
                stringify!($of_row), stringify!($of_direction), stringify!($ratio), stringify!($($compare)*)
            )?),
            step: [stringify!($x), stringify!($gradient), stringify!($($body)*)],
        };
    };
}

/// Parts of `step!` that may be left out.
macro_rules! body {
    (@is_present) => {
        true
    };
    (@is_present $flag:ident) => {
        $flag
    };
    (@has) => {
        false
    };
    (@has $name:ident) => {
        true
    };
    (@presence) => {
        "true"
    };
    (@presence $flag:ident) => {
        stringify!($flag)
    };
    (@text) => {
        None
    };
    (@text $name:expr, $text:expr) => {
        Some([$name, $text])
    };
    (@text $from:expr, $to:expr, $text:expr) => {
        Some([$from, $to, $text])
    };
    (@reduction) => {
        None
    };
    (@reduction $state:expr, $from:expr, $to:expr, $text:expr) => {
        Some([$state, $from, $to, $text])
    };
}

pub(super) use {body, step};

/// A step as text.
pub(super) struct Source {
    pub name: &'static str,
    pub flags: &'static [&'static str],
    pub scalars: &'static [&'static str],
    /// Name, and the flag that says whether there is one.
    pub states: &'static [(&'static str, &'static str)],
    /// Name of the count, body.
    pub prepare: Option<[&'static str; 2]>,
    /// Names of the row's state, of the mean of squares and of what is computed; body.
    pub reduce: Option<[&'static str; 4]>,
    /// Names of the gradient and of the direction; body.
    pub direct: Option<[&'static str; 3]>,
    /// Names of the sums of squares of the row and of its directions, and of what is computed; body.
    pub ratio: Option<[&'static str; 4]>,
    /// Names of the value and of the gradient; body.
    pub step: [&'static str; 3],
}

/// A template with its arguments.
pub(super) fn device_type(name: &str, flags: &[bool]) -> String {
    let flags: Vec<String> = flags.iter().map(bool::to_string).collect();
    if flags.is_empty() { name.to_string() } else { format!("{name}<{}>", flags.join(", ")) }
}

impl Source {
    /// A struct with static functions, which take scalars as the array that [`Step::scalars`](super::step::Step::scalars) gives.
    pub fn cuda(&self) -> String {
        let flags: Vec<String> = self.flags.iter().map(|flag| format!("bool {flag}")).collect();
        let template =
            if flags.is_empty() { String::new() } else { format!("template <{}> ", flags.join(", ")) };
        let presence: Vec<&str> = self.states.iter().map(|(_, flag)| *flag).collect();
        let count = |states: &[&str]| [&["0"], states].concat().join(" + ");
        let scalars = |qualifier: &str| -> String {
            let one = |(i, name): (usize, &&str)| format!("    {qualifier}float& {name} = scalars[{i}];\n");
            self.scalars.iter().enumerate().map(one).collect()
        };
        let states = self.states.iter().enumerate();
        let states: String = states
            .map(|(i, (name, _))| format!("    float& {name} = states[{}];\n", count(&presence[..i])))
            .collect();
        let [x, gradient, step] = self.step;
        let [row_state, mean, reduced, reduce] =
            self.reduce.unwrap_or(["state", "mean", "reduced", "let reduced = 0.0;"]);
        let [given, direction, direct] = self.direct.unwrap_or(["gradient", "gradient", ""]);
        let [of_row, of_direction, ratio, compare] =
            self.ratio.unwrap_or(["row", "direction", "ratio", "let ratio = 1.0;"]);
        // What a step may read of its whole row: only one of the two has a name.
        let of_whole = if self.ratio.is_some() { ratio } else { reduced };
        let [number, prepare] = self.prepare.unwrap_or(["count", ""]);
        format!(
            "\
{template}struct {name} {{
  static constexpr u32 STATES = {num_states};
  static constexpr bool REDUCES = {reduces};
  static constexpr bool DIRECTS = {directs};
  static __device__ __forceinline__ void prepare(float* scalars, float rate, u64 {number}) {{
{all_scalars}    learning_rate = rate;
    {prepare}
  }}
  static __device__ __forceinline__ float reduce(const float* scalars, float& {row_state}, float {mean}) {{
{const_scalars}    {reduce}
    return {reduced};
  }}
  static __device__ __forceinline__ float direct(const float* scalars, float* states, float {given}) {{
{const_scalars}{states}    {direct}
    return {direction};
  }}
  static __device__ __forceinline__ float ratio(const float* scalars, float {of_row}, float {of_direction}) {{
{const_scalars}    {compare}
    return {ratio};
  }}
  static __device__ __forceinline__ float step(const float* scalars, float {x}, float* states, float {gradient}, float {of_whole}) {{
{const_scalars}{states}    {step}
    return {x};
  }}
}};
",
            name = self.name,
            num_states = count(&presence),
            reduces = self.reduce.is_some(),
            directs = self.direct.is_some(),
            all_scalars = scalars(""),
            const_scalars = scalars("const "),
            prepare = in_cuda(prepare),
            reduce = in_cuda(reduce),
            direct = in_cuda(direct),
            compare = in_cuda(compare),
            step = in_cuda(step),
        )
    }
}

/// A body in the words of CUDA C++: declarations have a type, and literals are floats.
fn in_cuda(body: &str) -> String {
    let mut text = String::new();
    let mut rest = body;
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_alphanumeric() || c == '_' || (first.is_ascii_digit() && c == '.');
        let end =
            if is_word(first) { rest.find(|c| !is_word(c)).unwrap_or(rest.len()) } else { first.len_utf8() };
        let (token, after) = rest.split_at(end);
        rest = after;
        match token {
            "let" => match after
                .trim_start()
                .strip_prefix("mut")
                .filter(|name| name.starts_with(char::is_whitespace))
            {
                Some(name) => {
                    rest = name;
                    text.push_str("float");
                }
                None => text.push_str("const float"),
            },
            _ if first.is_ascii_digit() => {
                text.push_str(token);
                text.push('f');
            }
            _ => text.push_str(token),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_becomes_cuda() {
        let body = "let one = 1.0 - x_2; let\nmut y = one * 0.5; if (FLAG) { y = sqrt(letter); }";
        let cuda = "const float one = 1.0f - x_2; float y = one * 0.5f; if (FLAG) { y = sqrt(letter); }";
        assert_eq!(in_cuda(body), cuda);
    }
}
