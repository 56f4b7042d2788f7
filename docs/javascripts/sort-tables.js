/* Sort the tables of a page by the column whose heading is clicked. No other file is loaded. */
(function () {
  "use strict";

  const FEWEST_ROWS = 4;

  /** Return the number at the beginning of a cell, or its text if there is none. */
  function valueOf(row, column) {
    const text = (row.cells[column]?.textContent ?? "").trim();
    const number = text.replace(/^[<>≥≤~+]\s*/, "").replace(/^[−–](?=\d)/, "-").match(/^-?[\d,]*\.?\d+/);
    return number ? parseFloat(number[0].replaceAll(",", "")) : text;
  }

  function compare(one, other) {
    if (typeof one === typeof other) {
      return typeof one === "number" ? one - other : one.localeCompare(other);
    }
    return typeof one === "number" ? -1 : 1;
  }

  function sort(table, column, isDown) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
    const [empty, filled] = [rows.filter((r) => r[0] === ""), rows.filter((r) => r[0] !== "")];
    filled.sort((a, b) => (isDown ? compare(b[0], a[0]) : compare(a[0], b[0])));
    body.append(...[...filled, ...empty].map((r) => r[1]));
  }

  function prepare(table) {
    const head = table.tHead?.rows[0];
    const body = table.tBodies[0];
    if (!head || !body || body.rows.length < FEWEST_ROWS) return;
    for (const [column, cell] of [...head.cells].entries()) {
      cell.classList.add("sortable");
      cell.tabIndex = 0;
      cell.title = "Sort by this column";
      const act = () => {
        const wasDown = cell.getAttribute("aria-sort") === "descending";
        const wasUp = cell.getAttribute("aria-sort") === "ascending";
        const isNumber = [...body.rows].some((row) => typeof valueOf(row, column) === "number");
        const isDown = wasUp || (isNumber && !wasDown);
        for (const other of head.cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        sort(table, column, isDown);
      };
      cell.addEventListener("click", act);
      cell.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        act();
      });
    }
  }

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll("article table:not([class])").forEach(prepare);
  });
})();
