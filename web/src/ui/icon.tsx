import type { VNode } from "preact";

// Lines on a grid of 24.
const PATHS = {
  plus: "M12 5v14M5 12h14",
  chat: "M5 5h14a2 2 0 0 1 2 2v8a2 2 0 0 1-2 2h-8l-5 4v-4H5a2 2 0 0 1-2-2V7a2 2 0 0 1 2-2Z",
  engine: "M3 12h4l3-8 4 16 3-8h4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  file: "M6 3h8l5 5v13H6ZM14 3v5h5M9 13h7M9 17h7",
  pin: "M9 4h6l-1 6 3 3H7l3-3ZM12 13v7",
  wrap: "M4 6h16M4 12h12a3 3 0 0 1 0 6h-4M15 15l-3 3 3 3M4 18h4",
  check: "M4 12.5 9.5 18 20 6.5",
  edit: "M4 20h4L19 9l-4-4L4 16v4ZM13.5 6.5l4 4",
  retry: "M19.5 8A8 8 0 1 0 20 13M20 4v4.500h-4.500",
  fork: "M6 4v16M6 14c0-4 10-2 10-7M13.500 7.500 16 5l2.500 2.500",
  trash: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13",
  stop: "M7 7h10v10H7z",
  send: "M12 19V5M6 11l6-6 6 6",
  clip: "M20 11.500 12 19.500a5 5 0 0 1-7-7l8.500-8.500a3.400 3.400 0 0 1 4.800 4.800L10 17a1.700 1.700 0 0 1-2.400-2.400l7.400-7.400",
  sliders: "M4 7h8M18 7h2M4 17h2M12 17h8M15 4.500a2.500 2.500 0 1 0 0 5 2.500 2.500 0 0 0 0-5ZM9 14.500a2.500 2.500 0 1 0 0 5 2.500 2.500 0 0 0 0-5Z",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6 6 18",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M6 10l6 6 6-6",
  bottom: "M12 5v14M6 13l6 6 6-6",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8ZM12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M19 5l-2 2M7 17l-2 2",
  moon: "M20 14.500A8.500 8.500 0 1 1 9.500 4a7 7 0 0 0 10.500 10.500Z",
  auto: "M12 3a9 9 0 1 0 0 18V3ZM12 3a9 9 0 0 1 0 18",
  import: "M12 4v11M7 10l5 5 5-5M4 20h16",
  export: "M12 15V4M7 9l5-5 5 5M4 20h16",
  key: "M14 10a5 5 0 1 0-2.500 4.300L13 16h3v3h4v-4l-6.200-5Z",
  tool: "M14 6a4 4 0 0 1 5-1l-3 3 1 2 2 1 3-3a4 4 0 0 1-6 5L8 21l-4-4 8-8a4 4 0 0 1 2-3Z",
  think: "M9 18h6M10 21h4M8.500 15a6 6 0 1 1 7 0c-.500.600-.500 1.200-.500 3H9c0-1.800 0-2.400-.500-3Z",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14ZM20 20l-4-4",
  pause: "M8 5v14M16 5v14",
  play: "M7 5l12 7-12 7Z",
  info: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18ZM12 11v5M12 7.500v.500",
} as const;

export type IconName = keyof typeof PATHS;

/** A picture beside or in place of words; the element around it has the words. */
export function Icon({ name }: { name: IconName }): VNode {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}
