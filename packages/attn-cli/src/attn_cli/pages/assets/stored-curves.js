// Curves of other runs, from their files: transformers' trainer_state.json, a table with commas, or a job's metrics.jsonl.

const OURS = { eval_loss: "validation_loss", grad_norm: "gradient_norm" };
const ALLOWED = "a trainer_state.json, a .csv with the columns step and loss, or a metrics.jsonl";

// Add a value to the curve of a metric. What begins again at an earlier step replaces its values from there on.
export function add(points, name, step, value) {
  const line = (points[name] ??= { x: [], y: [] });
  while (line.x.length && line.x.at(-1) >= step) {
    line.x.pop();
    line.y.pop();
  }
  line.x.push(step);
  line.y.push(value);
}

// The curves of a file by metric, { loss: { x, y } }; throws an error that says what the file should be.
export function curvesOf(name, text) {
  const points = {};
  for (const { step, ...values } of rowsOf(name, text)) {
    const numbers = Object.entries(values).map(([key, value]) => [key, typeof value === "string" && value.trim() ? Number(value) : value]);
    for (const [key, value] of numbers.filter(([, found]) => Number.isFinite(found))) {
      if (!Number.isInteger(Number(step ?? NaN))) throw new Error(`${name}: the step ${step} is no whole number.`);
      add(points, OURS[key] ?? key, Number(step), value);
    }
  }
  if (!Object.keys(points).length) throw new Error(`${name} has no values by step; allowed: ${ALLOWED}.`);
  return points;
}

function rowsOf(name, text) {
  const lines = text.split(/\r\n|\n|\r/).filter((line) => line.trim());
  try {
    if (name.endsWith(".csv")) {
      const [head, ...rows] = lines.map((line) => line.split(",").map((cell) => cell.trim().replace(/^"(.*)"$/, "$1")));
      return rows.map((row) => Object.fromEntries(head.map((key, place) => [key, row[place] ?? ""])));
    }
    // Python writes NaN, which is no JSON.
    const parsed = (json) => JSON.parse(json.replace(/(:\s*)(NaN|-?Infinity)/g, "$1null"));
    return [...(name.endsWith(".jsonl") ? lines.map(parsed) : parsed(text).log_history)];
  } catch (error) {
    throw new Error(`${name}: ${error.message}; allowed: ${ALLOWED}.`);
  }
}
